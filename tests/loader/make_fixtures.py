"""Writes the checkpoints and TorchScript archives that the loader's tests read.

Usage: make_fixtures.py FOLDER. Every file is deterministic in its content.
"""

import collections
import io
import pathlib
import struct
import sys
import zipfile

import torch


def save(folder, name, value, **options):
    path = folder / name
    torch.save(value, path, **options)
    return path


def rewrite(source, target, change, compression=zipfile.ZIP_STORED):
    """Copies a zip archive; `change` maps {name: bytes} to another such dict."""
    with zipfile.ZipFile(source) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name, content in change(records).items():
            archive.writestr(name, content)


def patch_pickle(source, target, old, new, record=None):
    """Replaces `old` once in data.pkl, and optionally the content of data/0."""

    def change(records):
        changed = {}
        for name, content in records.items():
            if name.endswith("/data.pkl"):
                assert content.count(old) >= 1, (target, old)
                content = content.replace(old, new, 1)
            if record is not None and name.endswith("/data/0"):
                content = record
            changed[name] = content
        return changed

    rewrite(source, target, change)


def make_plain(folder):
    weights = torch.arange(6.0)
    a = save(folder, "a.pt", {"w": weights})
    (folder / "b.bin").write_bytes(a.read_bytes())
    save(folder, "weird name (1).pt", {"w": weights})
    buffer = io.BytesIO()
    torch.save({"w": weights}, buffer)
    (folder / "c.pt").write_bytes(buffer.getvalue())
    save(folder, "legacy.pt", {"w": weights, "v": weights[2:4]}, _use_new_zipfile_serialization=False)
    save(folder, "view.pt", torch.zeros(1000000)[:10])
    save(folder, "legacy_view.pt", [torch.arange(100.0)[10:20]], _use_new_zipfile_serialization=False)
    (folder / "junk_before.pt").write_bytes(b"junk" * 4 + a.read_bytes())
    with zipfile.ZipFile(folder / "comment.pt", "w") as archive, zipfile.ZipFile(a) as good:
        for name in good.namelist():
            archive.writestr(name, good.read(name))
        archive.comment = b"hello"
    rewrite(a, folder / "deflated.pt", lambda records: records, zipfile.ZIP_DEFLATED)
    rewrite(a, folder / "stored.pt", lambda records: records)
    rewrite(a, folder / "two_tops.pt", lambda records: {**records, "other/data/1": b"x"})
    big = torch.arange(3000000, dtype=torch.int32)
    save(folder, "big.pt", {"big": big})
    rewrite(folder / "big.pt", folder / "big_deflated.pt", lambda records: records, zipfile.ZIP_DEFLATED)


def make_patched(folder):
    a = folder / "protocol2.pt"
    save(folder, "protocol2.pt", {"w": torch.arange(6.0)}, pickle_protocol=2)
    patch_pickle(a, folder / "b6a.pt", b"K\x06\x85", b"MX\x02\x85")
    patch_pickle(a, folder / "b6b.pt", b"QK\x00", b"QK\x03")
    patch_pickle(a, folder / "b6c.pt", b"QK\x00", b"QJ\xff\xff\xff\xff")
    patch_pickle(a, folder / "b6d.pt", b"K\x01\x85", b"J\xff\xff\xff\xff\x85")
    wrapped = b"\x8a\x08" + struct.pack("<Q", 0x4000000000000001)
    patch_pickle(a, folder / "b7a.pt", b"K\x06t", wrapped + b"t", record=b"\0\0\0\0")
    patch_pickle(a, folder / "b7b.pt", b"K\x06t", b"J\xff\xff\xff\xfft")
    patch_pickle(a, folder / "b11.pt", b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")

    command = f"touch {folder}/pwned".encode()
    evil = b"\x80\x02cposix\nsystem\n(X" + struct.pack("<I", len(command)) + command + b"tR."
    run = lambda pickle: lambda records: {
        name: pickle if name.endswith("/data.pkl") else content for name, content in records.items()
    }
    rewrite(a, folder / "b8.pt", run(evil))
    rewrite(a, folder / "cyclic.pt", run(b"\x80\x02]q\x00h\x00a."))
    rewrite(a, folder / "deep.pt", run(b"\x80\x02" + b"]" * 100000 + b"a" * 99999 + b"."))
    bomb = b"\x80\x02]q\x00" + b"".join(b"](" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(60))
    rewrite(a, folder / "bomb.pt", run(bomb + b"."))
    rewrite(a, folder / "big_endian.pt", lambda records: {
        name: b"big" if name.endswith("byteorder") else content for name, content in records.items()
    })
    rewrite(a, folder / "no_record.pt", lambda records: {
        name: content for name, content in records.items() if not name.endswith("/data/0")
    })


DTYPES = {
    "uint16": 65535, "uint32": 4294967295, "uint64": 2**63, "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0, "bfloat16": -0.0, "bool": True, "float16": 1.5, "float64": 2.5,
    "int8": -1, "int16": -2, "int32": -3, "int64": -4, "uint8": 7, "float32": 0.5,
    "float8_e4m3fnuz": 1.0, "float8_e5m2fnuz": 1.0,
    "complex64": 1 + 2j, "complex128": 3 + 4j,
}


def make_values(folder):
    values = {name: torch.tensor([value], dtype=getattr(torch, name)) for name, value in DTYPES.items()}
    values["complex32"] = torch.tensor([1 + 2j]).to(torch.complex32)
    save(folder, "dtypes.pt", values)
    expected = {
        name: bytes(tensor.view(torch.uint8).tolist()).hex() for name, tensor in values.items()
    }
    (folder / "dtypes.txt").write_text("".join(f"{k} {v}\n" for k, v in expected.items()))

    norm = torch.nn.BatchNorm1d(10)
    save(folder, "state.pt", norm.state_dict())
    shared = torch.nn.Parameter(torch.arange(4.0))
    base = torch.arange(12.0)
    nested = {
        "model": collections.OrderedDict(a=shared, b=[shared, base[2:5], base.view(3, 4).t()]),
        "step": 7, "big": 2**80, "ratio": float("nan"), "name": "näme", "raw": b"\x00\xff",
        "tuple": (1, None, True), "size": torch.Size([2, 3]), "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"), "set": {1}, 3: torch.tensor(3), "complex": 1 + 2j,
        "conj": torch.tensor([1 + 2j]).conj(), "meta": torch.empty(2, 3, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 3, torch.quint8),
        "path": pathlib.PurePosixPath("a/b"),
        "sparse": torch.sparse_coo_tensor([[0, 1], [2, 0]], [3.0, 4.0], (2, 3)),
    }
    for protocol in (2, 4, 5):
        save(folder, f"nested{protocol}.pt", nested, pickle_protocol=protocol)
    make_channels(folder)
    save(folder, "module.pt", torch.nn.Linear(2, 2))
    save(folder, "legacy_dtypes.pt", values, _use_new_zipfile_serialization=False)
    save(folder, "empty.pt", {"e": torch.empty(0, 3), "n": {}})


def make_channels(folder):
    values = torch.tensor([[-1.0, 0.0, 1.0], [1.0, 2.0, 3.0]])
    scales = torch.tensor([0.5, 9.0, 0.25])[::2]
    channels = torch.quantize_per_channel(values, scales, torch.tensor([1, -2]), 0, torch.qint8)
    floats = torch.quantize_per_channel(
        values, torch.tensor([0.5, 0.25]), torch.tensor([0.5, 1.5]), 0, torch.quint8
    )
    path = save(folder, "channels.pt", {"c": channels, "f": floats, "after": torch.arange(3.0)})
    rewrite(path, folder / "channels_deflated.pt", lambda records: records, zipfile.ZIP_DEFLATED)
    patch_pickle(path, folder / "channels_wrong.pt", b"K\x02\x85", b"K\x01\x85")


class Shared(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3, bias=False)
        self.b = torch.nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("k", torch.arange(3.0))

    def forward(self, x):
        return self.a(x) + self.b(x) + self.k + torch.tensor([1.0, 2.0, 3.0])


FREE = torch.jit.trace(lambda x: x + torch.tensor([1.0, 2.0, 3.0]), torch.ones(3))


class Caller(torch.nn.Module):
    def forward(self, x):
        return FREE(x)


def make_short_records(folder):
    """Records with fewer bytes than the pickles claim, of a constant and of a parameter."""
    traced = torch.jit.trace(Shared(), torch.ones(1, 3))
    torch.jit.save(traced, folder / "short.pt")
    torch.jit.save(torch.jit.script(Caller()), folder / "free.pt")
    rewrite(folder / "free.pt", folder / "short_free.pt", lambda records: {
        name: b"abcd" if name.endswith("/constants/0") else data for name, data in records.items()
    })
    for record in ("constants/0", "data/0"):
        rewrite(folder / "short.pt", folder / f"short_{record[:-2]}.pt", lambda records: {
            name: b"abcd" if name.endswith("/" + record) else data for name, data in records.items()
        })


def make_scripts(folder):
    torch.manual_seed(0)
    module = Shared()
    traced = torch.jit.trace(module, torch.ones(1, 3))
    source = folder / "ts.pt"
    torch.jit.save(traced, source, _extra_files={"info.txt": "hello"})
    weight = bytes(module.a.weight.detach().contiguous().view(torch.uint8).flatten().tolist())
    (folder / "ts_weight.bin").write_bytes(weight)

    def replaced(content):
        return lambda records: {
            name: content if name.endswith("/constants.pkl") else data for name, data in records.items()
        }

    rewrite(source, folder / "c2a.pt", replaced(b""))
    rewrite(source, folder / "c2b.pt", replaced(b"\x80\x02}(K\x01u."))
    rewrite(source, folder / "c2c.pt", replaced(b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n)R."))
    make_short_records(folder)
    rewrite(source, folder / "case.pt", lambda records: {
        **records, **{n.replace("/data/0", "/DATA/0"): d for n, d in records.items() if n.endswith("/data/0")}
    })
    big = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.ReLU()))
    torch.jit.save(big, folder / "ts_big.pt")
    weight = big.state_dict()["0.weight"]
    (folder / "ts_big.bin").write_bytes(bytes(weight.view(torch.uint8).flatten().tolist()))


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    make_plain(folder)
    make_patched(folder)
    make_values(folder)
    make_scripts(folder)


if __name__ == "__main__":
    main()
