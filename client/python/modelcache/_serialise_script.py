"""TorchScript: an archive of code without the tensors' bytes, and storages beside it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Dict, Iterator, Tuple

import torch

if TYPE_CHECKING:
    from modelcache._serialise_pickler import Pickler

_FOLDER = "0"  # the archive keeps the module under .data/ts_code/<this>


def reduce_module(pickler: "Pickler", module: torch.jit.ScriptModule) -> Any:
    if "_actual_script_module" in module.__dict__:  # a traced one is a wrapper
        return (_traced, (type(module),), dict(module.__dict__))
    archive, records = _save(module._c)
    return (_load, (archive, records, type(module)))


def reduce_function(pickler: "Pickler", function: torch.jit.ScriptFunction) -> Any:
    from modelcache import _serialise_objects as objects

    source = getattr(function, "_torchdynamo_inline", None)  # what was scripted, under its name now
    if source is not None and objects.found_at(source.__module__, source.__qualname__) is function:
        return (objects.find, (source.__module__, source.__qualname__))
    module = torch.jit.load(io.BytesIO(function.save_to_buffer()))
    archive, records = _save(module._c)
    arguments = (archive, records, function.qualified_name)
    return (_load_function, arguments, dict(function.__dict__))


def _save(module: Any) -> Tuple[bytes, Dict[str, torch.UntypedStorage]]:
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer)
    serializer = torch._C.ScriptModuleSerializer(writer)
    context = serializer.storage_context()
    records: Dict[str, torch.UntypedStorage] = {}
    for tensor in _tensors(module):
        storage = tensor.untyped_storage()
        if not context.has_storage(storage):
            number = context.get_or_add_storage(storage)
            records[f"{number}.storage"] = storage
    serializer.serialize(module, int(_FOLDER))
    serializer.write_files()
    writer.write_end_of_file()
    return buffer.getvalue(), records


def _tensors(module: Any) -> Iterator[torch.Tensor]:
    """Those of a module and the modules in it that lie in storages: attributes and constants."""
    pending = [module]
    while pending:
        module = pending.pop()
        for _, value in torch._C._jit_debug_module_iterators(module)["named_attributes"]:
            if isinstance(value, torch.Tensor) and _has_storage(value):
                yield value
            elif isinstance(value, torch._C.ScriptModule):
                pending.append(value)
        for name in module._method_names():
            for node in module._get_method(name).graph.findAllNodes("prim::Constant"):
                if node.hasAttribute("value") and node.kindOf("value") == "t":
                    if _has_storage(node.t("value")):
                        yield node.t("value")


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel() > 0


def _cpp_module(archive: bytes, records: Dict[str, torch.UntypedStorage]) -> Any:
    reader = torch._C.PyTorchFileReader(io.BytesIO(archive))
    context = torch._C.DeserializationStorageContext()
    for record, storage in records.items():
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        context.add_storage(record, tensor)
    return torch._C._import_ir_module_from_package(
        torch._C.CompilationUnit(), reader, context, None, _FOLDER
    )


def _load(archive: bytes, records: Dict[str, torch.UntypedStorage], kind: type) -> Any:
    return torch.jit._recursive.wrap_cpp_module(_cpp_module(archive, records))


def _traced(kind: type) -> Any:
    return kind.__new__(kind)


def _load_function(
    archive: bytes, records: Dict[str, torch.UntypedStorage], name: str
) -> torch.jit.ScriptFunction:
    """The function inside the module that torch saves a function in."""
    graph = _cpp_module(archive, records)._get_method("forward").graph
    torch._C._jit_pass_inline(graph)
    graph.eraseInput(0)  # the module itself
    return torch._C._create_function_from_graph(name.rpartition(".")[2], graph)
