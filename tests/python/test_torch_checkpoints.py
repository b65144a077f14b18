"""torch.save checkpoints: equal to torch.load, and never trusted."""

import collections
import shutil
import struct
import subprocess
import zipfile

import pytest
import torch

from cachetest.files import GOOD, LFS_POINTER, PICKLE, patched, pt, rezip
from cachetest.processes import ask

SIX = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of torch.save itself."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(6.0)}, path)
    return path


def write(folder, data, name="x.pt"):
    path = folder / name
    path.write_bytes(data)
    return path


def test_the_hand_made_pickle_is_what_torch_writes(tmp_path, saved):
    with zipfile.ZipFile(saved) as archive:
        assert archive.read("a/data.pkl") == PICKLE
    assert torch.load(write(tmp_path, pt()))["w"].tolist() == SIX


# ---- files that are something else --------------------------------------------------------------


@pytest.mark.parametrize(
    "data, needle",
    [
        (b"", ("empty", "0 bytes")),
        (b"<!DOCTYPE html><html>404</html>", "HTML"),
        (LFS_POINTER, "Git LFS"),
        (b"junk" * 4 + pt(), ("junk", "zip")),
    ],
    ids=["empty", "html", "lfs", "junk before"],
)
def test_something_else_under_a_checkpoint_name(tmp_path, refused, data, needle):
    """B1"""
    refused(write(tmp_path, data), needle, status=("bad_file", "unsupported"))


def test_archive_comment_is_allowed(tmp_path, client, saved):
    """B1 e"""
    rezip(saved, tmp_path / "e.pt", comment=b"12345")
    assert client.open(tmp_path / "e.pt")["w"].tolist() == SIX


def test_checkpoint_cut_short(tmp_path, refused, saved):
    data = saved.read_bytes()
    for keep in (len(data) - 1, len(data) // 2, 40):
        refused(write(tmp_path, data[:keep], f"cut{keep}.pt"), status=("bad_file", "unsupported"))


# ---- storages -----------------------------------------------------------------------------------


def test_small_view_keeps_its_big_storage_once(tmp_path, client, daemon):
    """B2"""
    path = tmp_path / "view.pt"
    torch.save(torch.zeros(1000000)[:10], path)
    before = daemon.status()["arena_bytes"]
    tensor = client.open(path).object()
    assert tensor.shape == (10,)
    assert tensor.untyped_storage().nbytes() == 4000000
    assert daemon.status()["arena_bytes"] - before == 4000000
    other = client.open(path)
    assert (other.hit, other.object().shape) == (True, (10,))
    assert daemon.status()["arena_bytes"] - before == 4000000


def test_repacked_without_compression(tmp_path, client, saved):
    """B3 b: the record starts where no float may, in the file; not in the client."""
    rezip(saved, tmp_path / "stored.pt")
    tensor = client.open(tmp_path / "stored.pt")["w"]
    assert tensor.tolist() == SIX
    assert tensor.data_ptr() % 64 == 0


def test_repacked_with_compression(tmp_path, client, saved, refused):
    """B3 a: the right values, or an error that names the record; never deflated bytes."""
    path = tmp_path / "deflated.pt"
    rezip(saved, path, zipfile.ZIP_DEFLATED)
    try:
        tensor = client.open(path)["w"]
    except Exception:
        refused(path, "data/0", "compressed", status=("bad_file", "unsupported"))
    else:
        assert tensor.tolist() == SIX


def test_archive_folder_is_not_the_file_name(tmp_path, client, saved):
    """B4"""
    shutil.copy(saved, tmp_path / "b.bin")
    torch.save({"w": torch.arange(6.0)}, tmp_path / "weird name (1).pt")
    with open(tmp_path / "c.pt", "wb") as file:  # an open file: the folder is then "archive"
        torch.save({"w": torch.arange(6.0)}, file)
    for name in ("b.bin", "c.pt", "weird name (1).pt"):
        assert client.open(tmp_path / name)["w"].tolist() == SIX, name


def test_two_archive_folders_are_refused(tmp_path, refused):
    """B4"""
    path = write(tmp_path, pt())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/data.pkl", PICKLE)
        archive.writestr("other/data/0", bytes(24))
    refused(path, "other")


def test_legacy_format(tmp_path, client, refused):
    """B5: read, or refused by its name."""
    path = tmp_path / "old.pt"
    torch.save({"w": torch.arange(6.0)}, path, _use_new_zipfile_serialization=False)
    assert path.read_bytes()[:14].hex() == "80028a0a6cfc9c46f9206aa85019"
    try:
        tensor = client.open(path)["w"]
    except NotImplementedError:
        refused(path, "legacy", status=("unsupported",))
    else:
        assert tensor.tolist() == SIX


# ---- crafted pickles ----------------------------------------------------------------------------

BEYOND = {
    "shape 600": (b"K\x06\x85", b"MX\x02\x85", "2400"),
    "offset 3": (b"QK\x00", b"QK\x03", "36"),
    "offset -1": (b"QK\x00", b"QJ\xff\xff\xff\xff", "-1"),
    "stride -1": (b"K\x01\x85", b"J\xff\xff\xff\x7f\x85", "24"),
}


@pytest.mark.parametrize("old, new, number", BEYOND.values(), ids=BEYOND.keys())
def test_view_that_leaves_its_storage(tmp_path, refused, old, new, number):
    """B6"""
    refused(write(tmp_path, pt(patched(old, new))), "'0'", number)


COUNTS = {
    "wraps": (b"\x8a\x08\x01\x00\x00\x00\x00\x00\x00\x40", bytes(4)),
    "negative": (b"J\xff\xff\xff\xff", bytes(24)),
    "more than the record holds": (b"K\x07", bytes(24)),
}


@pytest.mark.parametrize("count, record", COUNTS.values(), ids=COUNTS.keys())
def test_element_count_that_lies(tmp_path, refused, count, record):
    """B7"""
    pickle = patched(b"q\x06K\x06tq", b"q\x06" + count + b"tq")
    refused(write(tmp_path, pt(pickle, {"0": record})), ("'0'", "data/0"))


def test_missing_record_is_named(tmp_path, refused):
    refused(write(tmp_path, pt(records={})), "'0'", "missing")


def test_record_larger_than_the_file_is_refused(tmp_path, refused):
    """The directory of the zip claims 2 GiB for a record of 24 bytes."""
    data = bytearray(pt())
    central = data.rindex(b"archive/data/0") - 46
    assert data[central : central + 4] == b"PK\x01\x02"
    struct.pack_into("<II", data, central + 20, 2**31, 2**31)
    refused(write(tmp_path, bytes(data)))


def test_pickle_that_runs_a_command(tmp_path, refused):
    """B8"""
    target = tmp_path / "pwned"
    command = f"touch {target}".encode()
    pickle = b"\x80\x02cposix\nsystem\n(X" + struct.pack("<I", len(command)) + command + b"tR."
    path = write(tmp_path, pt(pickle))
    refused(path, "posix.system", status=("bad_file", "unsupported"))
    assert not target.exists()


def test_pickle_that_builds_through_attributes(tmp_path, refused):
    """Names that are allowed only lead to what is allowed: no dotted walk to something else."""
    pickle = b"\x80\x04ccollections\nOrderedDict.__init__.__globals__\n."
    refused(write(tmp_path, pt(pickle)), "OrderedDict.__init__", status=("bad_file", "unsupported"))


BROKEN_PICKLES = {
    "empty": b"",
    "no stop": PICKLE[:-1],
    "pop from nothing": b"\x80\x020.",
    "unknown opcode": b"\x80\x02\xff.",
    "protocol 9": b"\x80\x09N.",
    "memo never set": b"\x80\x02h\x07.",
    "string longer than the record": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "no mark": b"\x80\x02t.",
    "deep": b"\x80\x02" + b"]" * 200000 + b"a" * 199999 + b".",
    "a list that holds itself": b"\x80\x02]q\x00h\x00a.",
    "text that is not UTF-8": b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
}


@pytest.mark.parametrize("pickle", BROKEN_PICKLES.values(), ids=BROKEN_PICKLES.keys())
def test_broken_pickles(tmp_path, refused, pickle):
    refused(write(tmp_path, pt(pickle)), status=("bad_file", "unsupported"))


def test_pickle_bomb_is_refused(tmp_path, refused):
    """A few bytes that describe 2^60 leaves by reference: no time, no memory."""
    level = b"]q\x00N" + b"a"
    pickle = b"\x80\x02" + level
    for memo in range(1, 61):
        pickle += (
            b"]q" + bytes([memo]) + b"h" + bytes([memo - 1]) + b"ah" + bytes([memo - 1]) + b"a"
        )
    refused(write(tmp_path, pt(pickle + b".")), status=("bad_file", "unsupported", "limit"))


def test_whole_module_is_named_not_run(tmp_path, client):
    """B9, natively: a class of a script is never imported; its tensors or its name are given."""
    path = tmp_path / "net.pt"
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.layer = torch.nn.Linear(2, 2)\n"
        "torch.save(Net(), sys.argv[1])\n"
    )
    import sys

    subprocess.run([sys.executable, script, path], check=True, timeout=60)
    try:
        model = client.open(path)
    except Exception as failure:
        assert "Net" in str(failure)
    else:
        assert any("__main__.Net" in place for place in model.opaque)


# ---- what torch.load gives ----------------------------------------------------------------------


def test_version_information_of_a_state_dict(tmp_path, client, daemon):
    """B10"""
    path = tmp_path / "bn.pt"
    torch.save(torch.nn.BatchNorm1d(10).state_dict(), path)
    expected = collections.OrderedDict([("", {"version": 2})])
    for state in (client.open(path).state_dict(), client.open(path).object()):
        assert type(state) is collections.OrderedDict
        assert state._metadata == expected
        torch.nn.BatchNorm1d(10).load_state_dict(state, strict=True)
    second = ask(
        daemon,
        """
        state = client.open(arguments["path"]).state_dict()
        say([type(state).__name__, state._metadata])
        """,
        path=path,
    )
    assert second == ["OrderedDict", {"": {"version": 2}}]


def test_gpu_tagged_storages_are_read_as_cpu_bytes(tmp_path, client):
    """B11"""
    pickle = patched(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
    tensor = client.open(write(tmp_path, pt(pickle)))["w"]
    assert (tensor.tolist(), tensor.device.type) == (SIX, "cpu")


def test_spellings_of_a_path_are_one_entry(tmp_path, client, daemon, saved, monkeypatch):
    """B12"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.pt").symlink_to(saved)
    entries = daemon.status()["entries"]
    spellings = [
        "a.pt",
        str(saved),
        saved,
        bytes(saved),
        f"{tmp_path}/../{tmp_path.name}/a.pt",
        "link.pt",
    ]
    ids = {client.open(path).model_id for path in spellings}
    assert len(ids) == 1
    assert daemon.status()["entries"] == entries + 1


def test_nested_object_equals_torch_load(tmp_path, client):
    shared = torch.arange(12.0)
    weight = torch.nn.Parameter(torch.ones(2, 2))
    value = {
        "model": collections.OrderedDict(a=shared[:4], b=shared[4:].reshape(2, 4), w=weight),
        "again": weight,
        "list": [1, 2.5, None, True, "text", (torch.tensor(7), "t")],
        "numbers": {"big": 2**80, "inf": float("inf"), 3: -1, (1, 2): b"\x00\xff"},
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "complex": 1 + 2j,
        "set": {1, 2},
        "empty": {},
        "t": shared.view(3, 4).t(),
    }
    path = tmp_path / "nested.pt"
    torch.save(value, path)
    direct = torch.load(path, weights_only=False)
    model = client.open(path)
    got = model.object()
    assert list(got) == list(direct)
    for name in ("numbers", "size", "dtype", "device", "complex", "set", "empty"):
        assert got[name] == direct[name], name
        assert type(got[name]) is type(direct[name]), name
    assert got["list"][:5] == direct["list"][:5]
    assert type(got["list"][5]) is tuple and got["list"][5][0].item() == 7
    assert got["again"] is got["model"]["w"]
    assert type(got["again"]) is torch.nn.Parameter and got["again"].requires_grad
    assert got["t"].stride() == direct["t"].stride() == (1, 4)
    a, b = got["model"]["a"], got["model"]["b"]
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert a.untyped_storage().nbytes() == 48
    a[0] = -5
    assert got["t"][0, 0] == -5
    assert type(got["model"]) is collections.OrderedDict
    assert set(model) >= {"model.a", "model.b", "model.w", "again", "t"}


def test_unrepresentable_leaves_are_named(tmp_path, client):
    path = tmp_path / "with-args.pt"
    import argparse

    torch.save({"args": argparse.Namespace(lr=0.1), "w": torch.ones(1)}, path)
    model = client.open(path)
    assert model["w"].tolist() == [1.0]
    assert any("args" in place and "argparse.Namespace" in place for place in model.opaque)
    assert "Namespace" in repr(model.object()["args"])


def test_bare_tensor_and_list_at_the_root(tmp_path, client):
    torch.save(torch.arange(3), tmp_path / "one.pt")
    torch.save([torch.arange(3), torch.arange(2)], tmp_path / "two.pt")
    assert client.open(tmp_path / "one.pt").object().tolist() == [0, 1, 2]
    assert [t.tolist() for t in client.open(tmp_path / "two.pt").object()] == [[0, 1, 2], [0, 1]]


def test_requires_grad_and_conjugate_and_negative(tmp_path, client):
    path = tmp_path / "bits.pt"
    value = {
        "g": torch.ones(2, requires_grad=True),
        "c": torch.tensor([1 + 2j, 3 + 4j]).conj(),
        "n": torch._neg_view(torch.tensor([1.0, 3.0])),
    }
    torch.save(value, path)
    model = client.open(path)
    assert model["g"].requires_grad and model["g"].is_leaf
    assert model["c"].is_conj() and model["c"].tolist() == [1 - 2j, 3 - 4j]
    assert model["n"].is_neg() and model["n"].tolist() == [-1.0, -3.0]


def kinds():
    """D12: one element of each kind whose tables lag behind."""
    bits = {
        "uint16": (torch.int16, -1),
        "uint32": (torch.int32, -1),
        "uint64": (torch.int64, -(2**63)),
        "float8_e4m3fn": (torch.uint8, 0x7E),
        "float8_e5m2": (torch.uint8, 0x7B),
        "bfloat16": (torch.int16, -(2**15)),
        "bool": (torch.uint8, 1),
    }
    made = {
        name: torch.tensor([raw], dtype=kind).view(getattr(torch, name))
        for name, (kind, raw) in bits.items()
    }
    made["complex32"] = torch.tensor([1.0, 2.0], dtype=torch.float16).view(torch.complex32)
    return made


SIZES = {
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex32": 4,
    "bfloat16": 2,
    "bool": 1,
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_young_dtypes_keep_type_and_bytes(tmp_path, client):
    """D12 through both file formats."""
    from safetensors.torch import save_file

    expected = kinds()
    torch.save(expected, tmp_path / "kinds.pt")
    known = {k: v for k, v in expected.items() if k != "complex32"}
    save_file(known, tmp_path / "kinds.safetensors")
    for file, values in (("kinds.pt", expected), ("kinds.safetensors", known)):
        model = client.open(tmp_path / file)
        for name, value in values.items():
            tensor = model[name]
            assert tensor.dtype == value.dtype, (file, name)
            assert tensor.nbytes == SIZES[name]
            assert tensor.view(torch.uint8).tolist() == value.view(torch.uint8).tolist(), name


@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_quantized_tensors(tmp_path, client):
    path = tmp_path / "quantized.pt"
    whole = torch.quantize_per_tensor(torch.tensor([[-1.0, 0.0], [1.0, 2.0]]), 0.5, 3, torch.qint8)
    channels = torch.quantize_per_channel(
        torch.tensor([[-1.0, 0.0], [1.0, 2.0]]),
        torch.tensor([0.5, 0.25]),
        torch.tensor([1, 2]),
        0,
        torch.quint8,
    )
    torch.save({"whole": whole, "channels": channels}, path)
    model = client.open(path)
    assert sorted(model) == sorted(torch.load(path))  # the quantizers' own tensors are none of it
    assert model["whole"].dtype == torch.qint8
    assert model["whole"].q_scale() == 0.5 and model["whole"].q_zero_point() == 3
    assert torch.equal(model["whole"].dequantize(), whole.dequantize())
    assert torch.equal(model["channels"].dequantize(), channels.dequantize())
    assert model["channels"].q_per_channel_scales().tolist() == [0.5, 0.25]
    assert model["channels"].q_per_channel_zero_points().tolist() == [1, 2]


@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_channels_of_signed_and_of_float_zero_points(tmp_path, client):
    path = tmp_path / "channels.pt"
    values, scales = torch.tensor([[-1.0, 0.0], [1.0, 2.0]]), torch.tensor([0.5, 0.25])
    saved = {
        "signed": torch.quantize_per_channel(values, scales, torch.tensor([1, -2]), 1, torch.qint8),
        "floats": torch.quantize_per_channel(
            values, scales, torch.tensor([0.5, 1.5]), 0, torch.quint8
        ),
    }
    torch.save(saved, path)
    model = client.open(path)
    assert sorted(model) == ["floats", "signed"]
    for name, expected in saved.items():
        tensor = model[name]
        assert tensor.qscheme() == expected.qscheme()
        assert tensor.q_per_channel_axis() == expected.q_per_channel_axis()
        assert torch.equal(tensor.int_repr(), expected.int_repr())
        assert torch.equal(tensor.q_per_channel_scales(), expected.q_per_channel_scales())
        assert torch.equal(tensor.q_per_channel_zero_points(), expected.q_per_channel_zero_points())


STRUCTURES = {
    "attribute of a plain dict": {"d": [], "type": "dict", "attrs": {"_metadata": 1}},
    "class of a dict": {"d": [], "type": "OrderedDict", "attrs": {"__class__": 1}},
    "unhashable key": {"d": [[{"l": []}, 1]], "type": "dict"},
    "unhashable item of a set": {"set": [{"d": [], "type": "dict"}]},
    "pair of three": {"d": [[1, 2, 3]], "type": "dict"},
    "no number": {"int": "x"},
    "no device": {"device": "nowhere:x"},
    "unknown node": {"what": 1},
}


@pytest.mark.parametrize("node", STRUCTURES.values(), ids=STRUCTURES.keys())
def test_structures_that_describe_no_object_are_errors_of_the_package(node):
    import modelcache
    from modelcache import _structure

    with pytest.raises(modelcache.Error) as caught:
        _structure.rebuild({"l": [node]}, lambda number: None)
    assert caught.value.status == "corrupt"


@pytest.mark.parametrize("deflated", [False, True], ids=["stored", "deflated"])
def test_numpy_file(tmp_path, client, deflated):
    import numpy as np

    arrays = {
        "w": np.arange(6.0, dtype=np.float32),
        "rows": np.arange(12, dtype=np.int64).reshape(3, 4),
        "columns": np.asfortranarray(np.arange(12, dtype=np.int16).reshape(3, 4)),
        "half": np.array([1.5, -2.0], dtype=np.float16),
        "flags": np.array([True, False, True]),
        "complex": np.array([1 + 2j], dtype=np.complex64),
        "scalar": np.array(7, dtype=np.uint8),
        "empty": np.zeros((0, 4)),
    }
    path = tmp_path / "arrays.npz"
    (np.savez_compressed if deflated else np.savez)(path, **arrays)
    model = client.open(path)
    assert sorted(model) == sorted(arrays)
    for name, array in arrays.items():
        expected = torch.from_numpy(array)
        assert model[name].dtype == expected.dtype, name
        assert model[name].shape == expected.shape, name
        assert torch.equal(model[name], expected), name
    assert model["columns"].stride() == (1, 3)
    assert model["rows"].stride() == (4, 1)


def test_a_good_file_after_all_of_this(tmp_path, client):
    assert client.open(write(tmp_path, GOOD))["w"].tolist() == [1.0, 2.0]
