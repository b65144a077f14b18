"""Names of nested tensors, and names that would steer a message: never another tensor, never a cut."""

import io
import json
import struct
import zipfile

import numpy as np
import pytest
import torch

from cachetest.files import PICKLE, SIX_FLOATS, patched, pt, rezip, st_tensors


def number(value):
    return torch.tensor([float(value)])


COLLISIONS = {
    "a dot in a key": ({"a": {"b": number(1)}, "a.b": number(2)}, ["['a']['b']", "['a.b']"]),
    "a number and its digits": ({1: number(1), "1": number(2)}, ["[1]", "['1']"]),
    "a list": ({"a": [number(1)], "a.0": number(2)}, ["['a'][0]", "['a.0']"]),
    "an empty key": ({"": {"a": number(1)}, "a": number(2)}, ["['']['a']", "['a']"]),
    "the root's name": ({"": number(1), "tensor": number(2)}, ["['']", "['tensor']"]),
    "no text": ({(1, 2): number(1), "key0": number(2)}, ["[key 0]", "['key0']"]),
    "a bool": ({True: number(1), "key0": number(2)}, ["[key 0]", "['key0']"]),
    "looks like the new name": (
        {"a": {"b": number(1)}, "['a']['b']": number(2), "a.b": number(3)},
        ["['a']['b']", "['[\\'a\\'][\\'b\\']']", "['a.b']"],
    ),
}


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value.item()]
    items = value.values() if isinstance(value, dict) else value
    return [leaf for item in items for leaf in leaves(item)]


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("value, names", COLLISIONS.values(), ids=COLLISIONS.keys())
def test_each_tensor_has_a_name_of_its_own(tmp_path, client, value, names, legacy):
    path = tmp_path / "x.pt"
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    model = client.open(path)
    assert list(model) == names
    assert [model[name].item() for name in names] == leaves(value)
    assert [t.item() for t in model.state_dict().values()] == leaves(value)
    for joined in ("a.b", "1", "a.0", "a", "tensor", "key0"):
        assert joined not in model
        with pytest.raises(KeyError):
            model[joined]
    direct, got = torch.load(path, weights_only=False), model.object()
    assert repr(got) == repr(direct)


def test_other_names_stay_as_they_are(tmp_path, client):
    path = tmp_path / "x.pt"
    torch.save({"a": {"b": number(1)}, "a.b": number(2), "c.d": {"e": number(3)}}, path)
    assert list(client.open(path)) == ["['a']['b']", "['a.b']", "c.d.e"]


def set_again(key, again):
    """{key: 0., "z": …} with `again` set to another tensor afterwards, as opcodes."""
    tensor = PICKLE[PICKLE.index(b"ctorch._utils") : PICKLE.rindex(b"s.")]
    other = tensor.replace(b"X\x01\x00\x00\x000q\x05", b"X\x01\x00\x00\x001q\x05")
    assert other != tensor
    return b"\x80\x02}" + key + tensor + b"s" + again + other + b"s."


KEYS = {
    "text": (b"X\x01\x00\x00\x00w", b"X\x01\x00\x00\x00w"),
    "int": (b"K\x01", b"K\x01"),
    "True is 1": (b"K\x01", b"\x88"),
    "1.0 is 1": (b"G" + struct.pack(">d", 1), b"K\x01"),
    "None": (b"N", b"N"),
    "bytes": (b"C\x01x", b"C\x01x"),
}


@pytest.mark.parametrize("key, again", KEYS.values(), ids=KEYS.keys())
def test_a_key_set_twice_has_its_last_value(tmp_path, client, key, again):
    path = tmp_path / "x.pt"
    path.write_bytes(pt(set_again(key, again), {"0": SIX_FLOATS, "1": bytes(24)}))
    direct = torch.load(path, weights_only=False)
    model = client.open(path)
    assert len(model) == len(direct) == 1
    assert next(iter(model.values())).tolist() == [0.0] * 6
    assert repr(model.object()) == repr(direct)


@pytest.mark.parametrize("format", ["safetensors", "pt"])
def test_a_name_with_a_zero_byte_is_refused(tmp_path, refused, format):
    """In C it would be the name "a", and so another tensor."""
    path = tmp_path / f"x.{format}"
    if format == "pt":
        torch.save({"a": number(1), "a\0b": number(2)}, path)
    else:
        tensors = {"a": ("U8", [1], b"\x01"), "a\0b": ("U8", [1], b"\x02")}
        path.write_bytes(st_tensors(tensors))
    refused(path, r"a\x00b", "zero byte")


HOSTILE = "w\0\n\x1b[2J\x7f\x85é"


def test_control_characters_of_names_are_shown_in_messages(tmp_path, refused, daemon):
    """The message goes on behind them, and the log keeps its lines."""
    text = json.dumps({HOSTILE: {"dtype": "U8", "shape": [4], "data_offsets": [0, 1]}})
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + b"1")
    shown = r"w\x00\x0a\x1b[2J\x7f"
    failure = refused(path, shown, "4 bytes")
    assert not set("\0\n\x1b") & set(str(failure))


def test_control_characters_of_pickled_names_are_shown(tmp_path, refused):
    name = "posix\x1b[2J\0.system"
    pickle = b"\x80\x04" + b"".join(
        b"X" + struct.pack("<I", len(part)) + part for part in (b"os", name.encode())
    )
    path = tmp_path / "x.pt"
    path.write_bytes(pt(pickle + b"\x93."))
    failure = refused(path, r"os.posix\x1b[2J\x00.system", "run code")
    assert not set("\0\x1b") & set(str(failure))


def test_content_of_files_stays_out_of_the_log(tmp_path, daemon, refused):
    """The client that opened the file is told what is in it; the log is for others to read."""
    secrets = {
        "text.safetensors": b"correct-horse-battery",
        "name.safetensors": st_tensors({"correct-horse-battery": ("F128", [1], b"1")}),
        "class.pt": pt(b"\x80\x02ccorrect-horse-battery\nNet\n)R."),
    }
    for name, data in secrets.items():
        path = tmp_path / name
        path.write_bytes(data)
        refused(path, "correct-horse-battery", status=("bad_file", "unsupported"))
        assert name in daemon.log()
    assert "correct-horse" not in daemon.log()


# ---- as the stock loaders read them --------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 8, 23, 25, 40])
def test_records_of_another_size_are_refused_as_by_torch(tmp_path, refused, size):
    path = tmp_path / "x.pt"
    path.write_bytes(pt(records={"0": bytes(size)}))
    with pytest.raises(RuntimeError):
        torch.load(path)
    refused(path, "needs 24 bytes", f"has {size}")


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", ["IntStorage", "DoubleStorage"])
def test_one_storage_under_two_dtypes_is_refused(tmp_path, refused, kind, legacy):
    """torch.save refuses to write it, and torch.load reads one of the two wrongly."""
    source, path = tmp_path / "source.pt", tmp_path / "x.pt"
    tensor = torch.arange(6.0)
    torch.save(
        {"w": tensor, "v": tensor.view(6)},
        source,
        pickle_protocol=2,
        _use_new_zipfile_serialization=not legacy,
    )
    key = b"X" if legacy else b"h\x05"  # the legacy format writes each use of the key anew
    again, other = b"h\x04" + key, f"ctorch\n{kind}\n".encode() + key
    if legacy:
        path.write_bytes(patched(again, other, source.read_bytes()))
    else:
        rezip(source, path, change=lambda name, old: old.replace(again, other))
    assert torch.load(path)["v"].dtype == torch.float32
    dtype = {"IntStorage": "24 bytes of int32", "DoubleStorage": "48 bytes of float64"}[kind]
    refused(path, "'v'", f"is used as 24 bytes of float32 and as {dtype}")


def archive(format, number):
    out = io.BytesIO()
    if format == "npz":
        np.savez(out, w=np.full(3, number, np.float32))
    else:
        torch.save({"w": torch.full((3,), float(number))}, out)
    return out.getvalue()


@pytest.mark.parametrize("format", ["npz", "pt"])
@pytest.mark.parametrize("before, after", [(b"", "archive"), (b"", b"x" * 100), ("cut", b"")])
def test_an_archive_with_something_around_it_is_refused(tmp_path, refused, format, before, after):
    """numpy reads the last one, torch the first, or neither."""
    good = archive(format, 1)
    before = archive(format, 2)[:-22] if before == "cut" else before
    after = archive(format, 2) if after == "archive" else after
    path = tmp_path / f"x.{format}"
    path.write_bytes(before + good + after)
    refused(path, ("other data", "does not agree", "local header"))


DATA = struct.pack("<4f", 1, 2, 3, 4)
HEADERS = [
    "{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}",
    "{'descr': '=f4', 'fortran_order': False, 'shape': (4,)}",
    "{'descr': '|f4', 'fortran_order': False, 'shape': (4,)}",
    "{'descr': 'f4', 'fortran_order': False, 'shape': (4,)}",
    "{'descr': '>f4', 'fortran_order': False, 'shape': (4,)}",
    "{'descr': '>u1', 'fortran_order': False, 'shape': (16,)}",
    "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 2)}",
    "{'descr': '<f4', 'fortran_order': 1, 'shape': (2, 2)}",
    "{'descr': '<f4', 'descr': '<i4', 'fortran_order': False, 'shape': (4,)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (4)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (5,)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (4,), 'x': 1}",
    "{'descr': [('x', '<f4'), ('y', '<f4')], 'fortran_order': False, 'shape': (2,)}",
    "{'descr': '|O', 'fortran_order': False, 'shape': (2,)}",
    "{'descr': '<U2', 'fortran_order': False, 'shape': (2,)}",
    "{'descr': '<c8', 'fortran_order': False, 'shape': (2,)}",
    "{'shape': (2, 2), 'descr': \"<f4\", 'fortran_order': False, }",
    "{}",
]


@pytest.mark.parametrize("deflated", [False, True], ids=["stored", "deflated"])
@pytest.mark.parametrize("header", HEADERS)
def test_npz_headers_as_numpy_reads_them_or_refused(tmp_path, client, refused, header, deflated):
    text = header.encode() + b"\n"
    path = tmp_path / "x.npz"
    kind = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as out:
        out.writestr("a.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + DATA)
    try:
        tensor = client.open(path)["a"]
    except Exception:
        refused(path, "'a.npy'", status=("bad_file", "unsupported"))
        assert header != HEADERS[0]
        return
    expected = np.load(path)["a"]
    assert tensor.numpy().dtype == expected.dtype
    assert np.array_equal(tensor.numpy(), expected)
    assert tensor.is_contiguous() == expected.flags.c_contiguous


@pytest.mark.parametrize("deflated", [False, True], ids=["stored", "deflated"])
def test_npz_record_with_a_wrong_crc(tmp_path, refused, deflated):
    path = tmp_path / "x.npz"
    (np.savez_compressed if deflated else np.savez)(path, a=np.arange(1000000, dtype=np.int32))
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        crc = struct.pack("<I", archive.infolist()[0].CRC)
    bad = bytes(data).replace(crc, b"\x01\x02\x03\x04")
    assert bad != data
    path.write_bytes(bad)
    with pytest.raises(zipfile.BadZipFile):
        np.load(path)["a"]
    refused(path, "'a.npy'", "CRC-32")


def test_a_changed_byte_of_a_stored_array(tmp_path, refused):
    path = tmp_path / "x.npz"
    np.savez(path, a=np.arange(1000000, dtype=np.int32))
    data = bytearray(path.read_bytes())
    data[2000000] ^= 1
    path.write_bytes(data)
    refused(path, "'a.npy'", "CRC-32")
