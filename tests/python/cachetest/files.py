"""Model files, byte by byte."""

import hashlib
import io
import json
import struct
import zipfile
from pathlib import Path

GOOD_HEADER = '{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
GOOD = struct.pack("<Q", 56) + GOOD_HEADER.encode().ljust(56) + struct.pack("<2f", 1.0, 2.0)
LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
)

# What torch.save writes as data.pkl for {"w": torch.arange(6.)}, protocol 2. Every patch of a test
# must find its opcode here exactly once.
PICKLE = (
    b"\x80\x02}q\x00X\x01\x00\x00\x00wq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x02(("
    b"X\x07\x00\x00\x00storageq\x03ctorch\nFloatStorage\nq\x04X\x01\x00\x00\x000q\x05"
    b"X\x03\x00\x00\x00cpuq\x06K\x06tq\x07QK\x00K\x06\x85q\x08K\x01\x85q\t\x89"
    b"ccollections\nOrderedDict\nq\n)Rq\x0btq\x0cRq\rs."
)
SIX_FLOATS = struct.pack("<6f", *range(6))


def st(header, data=b"", pad=True):
    """A safetensors file; `pad=False` leaves the header's length as it is."""
    text = header if isinstance(header, bytes) else header.encode()
    if pad:
        text = text.ljust(-(-len(text) // 8) * 8)
    return struct.pack("<Q", len(text)) + text + data


def st_tensors(tensors, metadata=None):
    """A safetensors file of {name: (dtype, shape, bytes)}, data in the order given."""
    header, data, offset = {}, [], 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, content) in tensors.items():
        end = offset + len(content)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        data.append(content)
        offset = end
    return st(json.dumps(header, separators=(",", ":")), b"".join(data))


def pt(pickle=PICKLE, records=None, folder="archive", compression=zipfile.ZIP_STORED):
    """A torch.save zip with `pickle` as data.pkl and {"0": six floats} as storages."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr(f"{folder}/data.pkl", pickle)
        for key, content in ({"0": SIX_FLOATS} if records is None else records).items():
            archive.writestr(f"{folder}/data/{key}", content)
        archive.writestr(f"{folder}/version", "3\n")
    return buffer.getvalue()


def patched(old, new, pickle=PICKLE):
    """The pickle with one opcode replaced; the opcode must occur once."""
    assert pickle.count(old) == 1, (old, pickle.count(old))
    return pickle.replace(old, new)


def rezip(source, target, compression=zipfile.ZIP_STORED, change=None, comment=b""):
    """Writes the records of a zip anew with zipfile. `change` maps (name, bytes) to bytes."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for item in old.infolist():
            content = old.read(item.filename)
            new.writestr(item.filename, change(item.filename, content) if change else content)
        new.comment = comment


def sparse_st(path, megabytes, tensors=1):
    """A safetensors file of zeros that takes no disk space: `tensors` U8 tensors of equal size.

    The first bytes of each differ, so that none equals another.
    """
    each = megabytes * 2**20 // tensors
    header = {
        f"t{i}": {"dtype": "U8", "shape": [each], "data_offsets": [i * each, (i + 1) * each]}
        for i in range(tensors)
    }
    start = st(json.dumps(header, separators=(",", ":")))
    with open(path, "wb") as file:
        file.write(start)
        file.truncate(len(start) + each * tensors)
        for i in range(tensors):
            file.seek(len(start) + i * each)
            file.write(f"{path}:{i}".encode())
    return Path(path)


def sharded(folder, shards, metadata=None):
    """A folder with an index. `shards` maps a file name to {tensor name: (dtype, shape, bytes)}."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for file_name, tensors in shards.items():
        (folder / file_name).write_bytes(st_tensors(tensors))
        weight_map.update(dict.fromkeys(tensors, file_name))
    write_index(folder, weight_map, metadata)
    return folder


def write_index(folder, weight_map, metadata=None):
    index = {"metadata": metadata or {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def sha256(data):
    return hashlib.sha256(data).hexdigest()
