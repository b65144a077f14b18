"""safetensors files: what is refused, and that what is taken equals the file to the last bit."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load as safetensors_load
from safetensors.torch import load_file, save_file

from cachetest.files import GOOD, LFS_POINTER, sha256, sharded, st, st_tensors, write_index
from cachetest.processes import ask


def write(folder, data, name="x.safetensors"):
    path = folder / name
    path.write_bytes(data)
    return path


def floats(*values):
    return struct.pack(f"<{len(values)}f", *values)


# ---- files that are something else, or cut ------------------------------------------------------


def test_lfs_pointer_is_named_as_such(tmp_path, refused):
    """A1: the first 8 bytes of a pointer text read as a header of 2e18 bytes."""
    assert len(LFS_POINTER) == 130
    refused(write(tmp_path, LFS_POINTER), "130", "Git LFS")


def test_short_download_is_refused_and_not_remembered(tmp_path, refused, client):
    """A2"""
    path = write(tmp_path, GOOD[:-3])
    refused(path, ("72", "w"), ("69", "5"))
    path.write_bytes(GOOD)
    assert client.open(path)["w"].tolist() == [1.0, 2.0]


def test_bytes_after_the_last_tensor_are_refused(tmp_path, refused):
    refused(write(tmp_path, GOOD + b"abc"), "75", "72")


@pytest.mark.parametrize("data", [b"", b"1234567", bytes(8)], ids=["empty", "7 bytes", "8 zeros"])
def test_file_too_short_for_a_header(tmp_path, refused, data):
    """A5"""
    refused(write(tmp_path, data), status=("bad_file", "unsupported"))


# ---- headers that lie ---------------------------------------------------------------------------


def one(dtype="F32", shape="[1]", offsets="[0,4]", name="t"):
    return f'{{"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}'


def test_shape_promises_more_than_the_range_holds(tmp_path, refused):
    """A3"""
    data = st(one(shape="[1000,1000]"), bytes(4))
    assert len(data) == 76
    refused(write(tmp_path, data), "'t'", "4000000", "4")


@pytest.mark.parametrize(
    "shape, offsets, size",
    [("[4294967296,4294967296]", "[0,0]", 88), ("[4611686018427387905]", "[0,4]", 84)],
)
def test_shape_product_that_wraps(tmp_path, refused, shape, offsets, size):
    """A4"""
    data = st(one(shape=shape, offsets=offsets))
    data += bytes(size - len(data))
    assert len(data) == size
    refused(write(tmp_path, data), "'t'", "overflow")


WRONG_FORMS = {
    "array": "[]",
    "string": '"x"',
    "number for a tensor": '{"a":3}',
    "no offsets": '{"a":{"dtype":"U8","shape":[4]}}',
    "offsets reversed": one("U8", "[4]", "[4,0]"),
    "offset negative": one("U8", "[4]", "[-1,3]"),
    "offset fraction": one("U8", "[4]", "[0,4.5]"),
    "three offsets": one("U8", "[4]", "[0,4,4]"),
    "offsets as text": one("U8", "[4]", '["0","4"]'),
    "shape negative": one("U8", "[-4]", "[0,4]"),
    "shape fraction": one("U8", "[4.0]", "[0,4]"),
    "nested too deep": "[" * 100000,
    "nested objects too deep": '{"a":' * 100000,
    "offset beyond 64 bits": one("U8", "[4]", "[0,99999999999999999999]"),
    "dtype a number": '{"a":{"dtype":1,"shape":[4],"data_offsets":[0,4]}}',
}


@pytest.mark.parametrize("header", WRONG_FORMS.values(), ids=WRONG_FORMS.keys())
def test_valid_json_of_the_wrong_form(tmp_path, refused, header):
    """A5"""
    refused(write(tmp_path, st(header, bytes(4))))


PADDINGS = {
    "spaces": b"   ",
    "newlines": b"\n\r\t",
    "zero bytes": b"\0\0\0",
    "a zero byte and text": b"\0xx",
    "text": b"  x",
    "a second object": b" {}",
}


@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS.keys())
def test_padding_of_the_header_as_the_reference_reads_it(tmp_path, client, refused, padding):
    data = st(one().encode() + padding, floats(1.5), pad=False)
    try:
        expected = safetensors_load(data)["t"].tolist()
    except SafetensorError:
        refused(write(tmp_path, data), "JSON")
    else:
        assert client.open(write(tmp_path, data))["t"].tolist() == expected == [1.5]


def test_zero_byte_in_an_index_is_refused(tmp_path, refused):
    folder = sharded(tmp_path / "m", shards())
    index = folder / "model.safetensors.index.json"
    index.write_bytes(index.read_bytes() + b"\0")
    refused(folder, "JSON", status=("bad_file",))


def test_overlapping_ranges_are_refused(tmp_path, refused):
    header = {
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
    }
    refused(write(tmp_path, st(json.dumps(header), bytes(6))), ("'a'", "'b'"))


def test_hole_between_ranges_is_refused(tmp_path, refused):
    header = {
        "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [4, 6]},
    }
    refused(write(tmp_path, st(json.dumps(header), bytes(6))), "'b'")


def test_name_that_occurs_twice_is_refused(tmp_path, refused):
    entry = '"a":{"dtype":"U8","shape":[2],"data_offsets":[%d,%d]}'
    header = "{" + entry % (0, 2) + "," + entry % (2, 4) + "}"
    refused(write(tmp_path, st(header, bytes(4))), "'a'")


@pytest.mark.parametrize("dtype", ["F128", "f32", "F8_E4M3FN"])
def test_unknown_dtype_is_named_with_its_tensor(tmp_path, refused, dtype):
    """A12"""
    data = st(one(dtype, offsets="[0,16]"), bytes(16))
    refused(write(tmp_path, data), "'t'", dtype, status=("bad_file", "unsupported"))


# ---- metadata -----------------------------------------------------------------------------------


def test_number_in_metadata_is_refused_by_name(tmp_path, refused):
    """A6"""
    header = '{"__metadata__":{"step":0},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    data = st(header, b"\x07")
    assert len(data) == 89
    refused(write(tmp_path, data), "__metadata__", "step")


def test_text_in_metadata_is_kept(tmp_path, client):
    """A6"""
    header = '{"__metadata__":{"step":"0"},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    model = client.open(write(tmp_path, st(header, b"\x07")))
    assert model["w"].tolist() == [7]
    assert model.metadata == {"step": "0"}


def test_metadata_without_tensors(tmp_path, client, daemon):
    """A7 a and c: nothing to map is still a model, and a hit the second time."""
    before = daemon.status()["arena_bytes"]
    described = write(tmp_path, st('{"__metadata__":{"key":"value"}}'), "a.safetensors")
    empty = write(tmp_path, st("{}"), "c.safetensors")
    assert (described.stat().st_size, empty.stat().st_size) == (40, 16)
    for path, metadata in ((described, {"key": "value"}), (empty, {})):
        model = client.open(path)
        assert (len(model), model.metadata, model.hit) == (0, metadata, False)
        assert dict(model.items()) == {}
        assert client.open(path).hit
    assert daemon.status()["arena_bytes"] == before


def test_broken_metadata_only_header(tmp_path, refused):
    """A7 b: valid JSON ends at byte 2, then more follows."""
    data = st('{},"__metadata__":{"key":"value"}}'.ljust(40))
    assert len(data) == 48
    refused(write(tmp_path, data), "JSON", ("byte 2", "byte 3", "column 3", "offset 2"))


def test_tensor_called_metadata_is_refused(tmp_path, refused):
    """A8"""
    header = '{"__metadata__":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}'
    data = st(header, struct.pack("<2i", 1, 2))
    assert len(data) == 88
    refused(write(tmp_path, data), "__metadata__")


# ---- shapes and dtypes --------------------------------------------------------------------------


def test_empty_tensors_keep_their_shapes(tmp_path, client, daemon):
    """A9"""
    header = (
        '{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
        '"b":{"dtype":"F32","shape":[2,0],"data_offsets":[0,0]},'
        '"c":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    )
    path = write(tmp_path, st(header, floats(1.5)))
    assert path.stat().st_size == 180
    before = daemon.status()["arena_bytes"]
    model = client.open(path)
    assert daemon.status()["arena_bytes"] - before == 4
    assert {name: tuple(t.shape) for name, t in model.items()} == {
        "a": (0,),
        "b": (2, 0),
        "c": (1,),
    }
    assert model["c"].tolist() == [1.5]
    shapes = ask(
        daemon,
        """
        model = client.open(arguments["path"])
        say([model.hit, {n: list(t.shape) for n, t in model.items()}, model["c"].tolist()])
        """,
        path=path,
    )
    assert shapes == [True, {"a": [0], "b": [2, 0], "c": [1]}, [1.5]]


def test_scalars_stay_scalars(tmp_path, client):
    """A10"""
    data = st(one(shape="[]", name="s"), floats(2.5))
    assert len(data) == 68
    scalar = client.open(write(tmp_path, data))["s"]
    assert (scalar.shape, scalar.item()) == ((), 2.5)

    state = torch.nn.BatchNorm1d(10).state_dict()
    torch.save(state, tmp_path / "bn.pt")
    save_file(state, tmp_path / "bn.safetensors")
    for name in ("bn.pt", "bn.safetensors"):
        batches = client.open(tmp_path / name)["num_batches_tracked"]
        assert (batches.dtype, batches.shape, batches.item()) == (torch.int64, (), 0)


def test_packed_four_bit_values(tmp_path, client):
    """A11 a"""
    header = '{"q":{"dtype":"F4","shape":[2,8],"data_offsets":[0,8]}}'
    data = st(header, bytes(range(8)))
    assert len(data) == 72
    tensor = client.open(write(tmp_path, data))["q"]
    assert (tensor.dtype, tensor.shape) == (torch.float4_e2m1fn_x2, (2, 4))
    assert tensor.view(torch.uint8).flatten().tolist() == list(range(8))


def test_odd_number_of_four_bit_values_is_refused(tmp_path, refused):
    """A11 b"""
    data = st(one("F4", "[3]", "[0,2]", name="q"), bytes(2))
    assert len(data) == 66
    refused(write(tmp_path, data), "'q'")


def test_exponent_only_dtype(tmp_path, client):
    """A11 c"""
    data = st(one("F8_E8M0", "[3]", "[0,3]", name="e"), b"\x7e\x7f\x80")
    assert len(data) == 75
    tensor = client.open(write(tmp_path, data))["e"]
    assert tensor.dtype == torch.float8_e8m0fnu
    assert tensor.float().tolist() == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_dtype_that_torch_lacks_is_a_clear_error_for_its_tensor_alone(tmp_path, client, dtype):
    content = bytes(range(3))
    path = write(tmp_path, st_tensors({"six": (dtype, [4], content), "w": ("U8", [1], b"\x09")}))
    model = client.open(path)
    assert model["w"].tolist() == [9]
    assert model.raw("six").tobytes() == content
    with pytest.raises(NotImplementedError, match=f"'six'.*{dtype}"):
        model["six"]


DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def test_every_dtype_of_the_format(tmp_path, client):
    sizes = {name: dtype.itemsize for name, dtype in DTYPES.items()}
    contents = {
        name: bytes(i % 2 if name == "BOOL" else (i * 37 + 1) % 256 for i in range(6 * size))
        for name, size in sizes.items()
    }
    path = write(
        tmp_path, st_tensors({name: (name, [2, 3], data) for name, data in contents.items()})
    )
    model = client.open(path)
    for name, dtype in DTYPES.items():
        tensor = model[name]
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (dtype, (2, 3), (3, 1)), name
        assert bytes(tensor.view(torch.uint8).flatten().tolist()) == contents[name], name
        assert tensor.untyped_storage().nbytes() == len(contents[name])


def test_equals_a_direct_load(tmp_path, client):
    """Names, order, dtype, shape, stride, offset, storage size, type and flags as stock gives."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        f"layer.{i}.weight": torch.randn((i % 5 + 1, 7), generator=generator, dtype=dtype)
        for i, dtype in enumerate([torch.float32, torch.float64, torch.float16] * 20)
    }
    path = tmp_path / "m.safetensors"
    save_file(tensors, path)
    direct, model = load_file(path), client.open(path)
    assert set(model) == set(direct)
    assert isinstance(model.state_dict(), dict)
    for name, expected in direct.items():
        tensor = model[name]
        assert type(tensor) is torch.Tensor
        assert torch.equal(tensor, expected)
        assert (tensor.dtype, tensor.stride(), tensor.storage_offset(), tensor.requires_grad) == (
            expected.dtype,
            expected.stride(),
            expected.storage_offset(),
            False,
        )
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.data_ptr() % 64 == 0


# ---- order --------------------------------------------------------------------------------------


def test_header_order_differs_from_data_order(tmp_path, client):
    """A13"""
    header = (
        '{"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},'
        '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    )
    data = st(header, b"\x01\x02\x03")
    assert len(data) == 123
    model = client.open(write(tmp_path, data))
    assert (model["a"].tolist(), model["b"].tolist()) == ([1], [2, 3])


def test_large_file_in_reverse_order_is_read_whole(tmp_path, client):
    """A13: several reader threads, each slice where it belongs."""
    each = 100 * 2**20
    header = {
        name: {"dtype": "U8", "shape": [each], "data_offsets": [i * each, (i + 1) * each]}
        for i, name in enumerate("cba")
    }
    content = np.random.default_rng(5).bytes(3 * each)
    path = write(tmp_path, st(json.dumps(dict(sorted(header.items()))), content))
    model = client.open(path)
    for i, name in enumerate("cba"):
        assert sha256(model.raw(name)) == sha256(memoryview(content)[i * each : (i + 1) * each])


# ---- ties and shards ----------------------------------------------------------------------------


def test_tied_weight_is_stored_once_under_one_name(tmp_path, client, daemon):
    """A14: such a file lists one of the two names; nothing invents the other."""
    weight = torch.arange(128.0).reshape(16, 8)
    save_file({"transformer.wte.weight": weight}, tmp_path / "model.safetensors")
    before = daemon.status()["arena_bytes"]
    model = client.open(tmp_path)
    assert list(model) == ["transformer.wte.weight"]
    assert "lm_head.weight" not in model
    assert daemon.status()["arena_bytes"] - before == 512


def shards():
    generator = np.random.default_rng(11)

    def tensor(*shape):
        size = 4 * int(np.prod(shape))
        return ("F32", list(shape), generator.bytes(size))

    return {
        "model-00001-of-00003.safetensors": {"model.embed.weight": tensor(64, 16)},
        "model-00002-of-00003.safetensors": {
            "model.layers.0.weight": tensor(16, 32),
            "model.layers.1.weight": tensor(16, 32),
        },
        "model-00003-of-00003.safetensors": {
            "model.norm.weight": tensor(16),
            "lm_head.weight": tensor(64, 16),
        },
    }


def everything(model):
    return {name: model.raw(name).tobytes() for name in model}


def contents(of):
    return {name: entry[2] for shard in of.values() for name, entry in shard.items()}


def test_folder_with_an_index_is_one_model(tmp_path, client, daemon):
    parts = shards()
    folder = sharded(tmp_path / "m", parts, {"total_size": 123})
    entries = daemon.status()["entries"]
    model = client.open(folder)
    assert everything(model) == contents(parts)
    assert model.index_metadata == {"total_size": 123}
    assert client.open(folder / "model.safetensors.index.json").model_id == model.model_id
    assert daemon.status()["entries"] == entries + 1


def test_missing_shard_is_named_until_it_is_back(tmp_path, refused, client):
    """A15"""
    parts = shards()
    folder = sharded(tmp_path / "m", parts)
    shard = folder / "model-00002-of-00003.safetensors"
    data = shard.read_bytes()
    shard.unlink()
    refused(folder, shard.name, status=("not_found",))
    shard.write_bytes(data)
    assert everything(client.open(folder)) == contents(parts)


def test_index_that_sends_a_tensor_to_the_wrong_shard(tmp_path, refused):
    """A16 a"""
    parts = shards()
    folder = sharded(tmp_path / "m", parts)
    weight_map = {name: shard for shard, tensors in parts.items() for name in tensors}
    weight_map["lm_head.weight"] = "model-00001-of-00003.safetensors"
    write_index(folder, weight_map)
    refused(folder, "lm_head.weight", "model-00001-of-00003.safetensors")


def test_stray_file_is_ignored(tmp_path, client):
    """A16 b"""
    parts = shards()
    folder = sharded(tmp_path / "m", parts)
    write(folder, st_tensors({"model.norm.weight": ("F32", [16], bytes(64))}), "extra.safetensors")
    assert everything(client.open(folder)) == contents(parts)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/hostname", "sub/x.safetensors", ".."]
)
def test_index_cannot_name_files_outside_its_folder(tmp_path, refused, name):
    """A16 c"""
    parts = shards()
    folder = sharded(tmp_path / "m", parts)
    write(tmp_path, GOOD, "outside.safetensors")
    weight_map = {tensor: shard for shard, tensors in parts.items() for tensor in tensors}
    write_index(folder, {**weight_map, "w": name})
    refused(folder, name, status=("bad_file", "invalid_argument"))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map":[]}', '{"weight_map":{"a":3}}', "[" * 100000],
    ids=["empty", "array", "no map", "map an array", "shard a number", "deep"],
)
def test_index_of_the_wrong_form(tmp_path, refused, text):
    folder = sharded(tmp_path / "m", shards())
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder)


def test_folder_without_a_model(tmp_path, refused):
    (tmp_path / "m").mkdir()
    refused(tmp_path / "m", status=("not_found",))


def test_format_is_told_from_content(tmp_path, client):
    torch.save({"w": torch.tensor([3.0])}, tmp_path / "really-torch.safetensors")
    write(tmp_path, GOOD, "really-safetensors.pt")
    assert client.open(tmp_path / "really-torch.safetensors").format == "torch"
    assert client.open(tmp_path / "really-safetensors.pt").format == "safetensors"


def test_a_format_asked_for_must_be_the_one(tmp_path, refused):
    refused(write(tmp_path, GOOD), format="torch", status=("bad_file", "unsupported"))
