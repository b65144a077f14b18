"""Writes the seeds of the safetensors and model_file corpora: small files of each kind.

    python tests/fuzz/seed_model_files.py tests/fuzz/corpus
"""

import collections
import io
import json
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import torch


def safetensors_file(header, data=b""):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    return struct.pack("<Q", len(text)) + text + data


def checkpoint(value, **options):
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def repacked(archive):
    """As a zip tool would: another order, compressed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for name in reversed(old.namelist()):
            new.writestr(zipfile.ZipInfo(name), old.read(name), zipfile.ZIP_DEFLATED)
    return out.getvalue()


def headers():
    yield "two", {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                  "b": {"dtype": "BF16", "shape": [], "data_offsets": [8, 10]}}
    yield "metadata", {"__metadata__": {"format": "pt"}}
    yield "huge_shape", {"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 8]}}
    yield "wrong_form", {"a": {"dtype": 3, "shape": "x", "data_offsets": [0]}}


def model_files():
    data = bytes(range(16))
    for name, header in headers():
        yield f"safetensors_{name}", safetensors_file(header, data[:10])
    yield "safetensors_long_header", struct.pack("<Q", 1 << 60) + b"{}"
    base = torch.arange(12.0)
    state = collections.OrderedDict(weight=base[2:8].view(2, 3).t(), bias=base[:2], n=torch.tensor(3, dtype=torch.uint16))
    state._metadata = collections.OrderedDict({"": {"version": 2}})
    plain = checkpoint({"state": state, "step": 7, "deep": [(1, "x", None), {2.5, b"y"}]})
    yield "torch_nested", plain
    yield "torch_repacked", repacked(plain)
    yield "torch_cut", plain[: len(plain) // 2]
    yield "torch_quantised", checkpoint(torch.quantize_per_tensor(base, 0.1, 3, torch.qint8))
    yield "torch_legacy", checkpoint(state, _use_new_zipfile_serialization=False)
    names = {"a": {"b": base}, "a.b": base, 1: base, "1": base, (1, 2): base, "['a']['b']": base}
    yield "torch_names", checkpoint(names)
    yield "torch_runs_code", checkpoint({"x": Path("/tmp")})
    out = io.BytesIO()
    np.savez(out, a=np.arange(6).reshape(2, 3), b=np.asfortranarray(np.eye(3)))
    yield "npz", out.getvalue()
    yield "npz_repacked", repacked(out.getvalue())
    out = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), out)
    yield "torchscript", out.getvalue()
    yield "lfs_pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 17\n"


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def main(corpus):
    for name, header in headers():
        write(corpus / "safetensors" / name, json.dumps(header).encode())
    write(corpus / "safetensors" / "deep", b'{"a":' + b"[" * 1000)
    for name, data in model_files():
        write(corpus / "model_file" / name, data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
