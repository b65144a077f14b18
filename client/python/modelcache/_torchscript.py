"""TorchScript modules over shared storages.

The archive in the arena is one that the loader wrote anew: code and pickles, with the tensors'
records left out and kept as storages. torch reads it with a storage context that already holds
them, so that parameters, buffers and constants point into the arena.
"""

from __future__ import annotations

import ctypes
import io
from typing import TYPE_CHECKING, Any, Dict

import torch

if TYPE_CHECKING:
    from modelcache._tensors import TensorBuilder

_CODE_FOLDER = "code"  # the archive keeps the module under .data/ts_code/<this>


def load(description: Dict[str, Any], builder: "TensorBuilder") -> torch.jit.ScriptModule:
    """The module of an archive. `description` is the manifest's "torchscript" member."""
    archive = builder.storage(description["archive"])
    reader = torch._C.PyTorchFileReader(
        io.BytesIO(ctypes.string_at(archive.data_ptr(), archive.nbytes()))
    )
    context = torch._C.DeserializationStorageContext()
    for record, number in description["records"].items():
        storage = builder.storage(number)
        context.add_storage(record, torch.empty(0, dtype=torch.uint8).set_(storage))
    module = torch._C._import_ir_module_from_package(
        torch._C.CompilationUnit(), reader, context, None, _CODE_FOLDER
    )
    return torch.jit._recursive.wrap_cpp_module(module)
