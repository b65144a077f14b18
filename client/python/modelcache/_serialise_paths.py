"""The parts of an object, with labels: for paths in messages and for comparing two objects."""

from __future__ import annotations

import collections
import copyreg
import datetime
import decimal
import enum
import functools
import pathlib
import re
import types
import uuid
import weakref
from typing import Any, Dict, Iterator, List, Tuple

import torch

Part = Tuple[str, Any]

ATOMS = frozenset(
    {
        bool,
        bytes,
        complex,
        float,
        int,
        str,
        type(None),
        type(Ellipsis),
        type(NotImplemented),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        datetime.date,
        datetime.datetime,
        datetime.timedelta,
        decimal.Decimal,
        pathlib.PosixPath,
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        range,
        re.Pattern,
        slice,
        uuid.UUID,
    }
)
_GLOBALS = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum)
_LIMIT = 1_000_000  # objects that a search looks at


def is_atom(value: Any) -> bool:
    """True for what has no parts and is the same wherever it is: values, classes, modules."""
    kind = type(value)
    return kind in ATOMS or isinstance(value, _GLOBALS) and _is_unbound(value)


def _is_unbound(value: Any) -> bool:
    owner = getattr(value, "__self__", None)
    return owner is None or isinstance(owner, types.ModuleType)


def parts(value: Any) -> List[Part]:
    """What a value consists of, in an order that two equal values agree on."""
    kind = type(value)
    if kind is dict:
        return _items(value)
    if kind is list or kind is tuple:
        return [(f"[{number}]", item) for number, item in enumerate(value)]
    if isinstance(value, torch.Tensor):
        return _tensor_parts(value)
    if isinstance(value, torch.jit.ScriptModule):
        return _script_parts(value)
    found: List[Part] = []
    if isinstance(value, dict):
        found += _items(value)
    elif isinstance(value, (list, tuple, collections.deque)):
        found += [(f"[{number}]", item) for number, item in enumerate(value)]
    elif isinstance(value, (set, frozenset)):
        found += [("{}", item) for item in value]
    elif isinstance(value, types.FunctionType):
        return _function_parts(value)
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        return [(".__self__", value.__self__)]
    elif isinstance(value, functools.partial):
        found += [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    elif isinstance(value, weakref.ref):
        return [("()", value())]
    elif isinstance(value, types.CellType):
        return _cell_parts(value)
    return found + attributes(value)


def attributes(value: Any) -> List[Part]:
    """Instance attributes. The parameters of a module are named as its users do."""
    hung = getattr(value, "__dict__", None)
    found: List[Part] = []
    if type(hung) is dict:
        for name, item in hung.items():
            if name in ("_parameters", "_buffers", "_modules") and isinstance(item, dict):
                found.append((f".{name}", tuple(item)))  # their order
                found += [(f".{key}", part) for key, part in item.items()]
            else:
                found.append((f".{name}", item))
    for name in copyreg._slotnames(type(value)) or ():
        if hasattr(value, name):
            found.append((f".{name}", getattr(value, name)))
    return found


def _items(value: Dict[Any, Any]) -> List[Part]:
    found = [(f"[{key!r}]" if is_atom(key) else "[…]", item) for key, item in value.items()]
    return found + [("[…]", key) for key in value if not is_atom(key)]


def _tensor_parts(value: torch.Tensor) -> List[Part]:
    found = [(f".{name}", item) for name, item in value.__dict__.items()]
    if hasattr(value, "__tensor_flatten__"):
        names = value.__tensor_flatten__()[0]
        found += [(f".{name}", getattr(value, name)) for name in names]
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(value, name, None):
            found.append((f".{name}", getattr(value, name)))
    return found


def _script_parts(value: torch.jit.ScriptModule) -> List[Part]:
    """Its Python attributes are but views of these."""
    tensors = [*value.named_parameters(), *value.named_buffers()]
    found: List[Part] = [(f".{name}", tensor.detach()) for name, tensor in tensors]
    found.append((".training", getattr(value, "training", None)))
    return found + [(f".{name}()", method.code) for name, method in _script_methods(value)]


def _script_methods(value: torch.jit.ScriptModule) -> List[Part]:
    return [(name, value._c._get_method(name)) for name in value._c._method_names()]


def _function_parts(value: types.FunctionType) -> List[Part]:
    found: List[Part] = [(".__defaults__", value.__defaults__)]
    found.append((".__kwdefaults__", value.__kwdefaults__))
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
        found += [(f".<{name}>", part) for _, part in _cell_parts(cell)]
    return found + [(f".{name}", item) for name, item in value.__dict__.items()]


def _cell_parts(cell: types.CellType) -> List[Part]:
    try:
        return [(".cell_contents", cell.cell_contents)]
    except ValueError:  # empty
        return []


def type_name(kind: type) -> str:
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__


def path_to(root: Any, wanted: Any) -> str:
    """Where `wanted` is in `root`, by the shortest way: "unet.hooks[3]"; "" if it is not found."""
    if root is wanted:
        return ""
    seen = {id(root)}
    kept: List[Any] = [root]  # parts may be made on the way: their addresses must stay taken
    pending = collections.deque([(root, "")])
    while pending and len(seen) < _LIMIT:
        value, path = pending.popleft()
        for label, part in _safe_parts(value):
            if part is wanted:
                return (path + label).lstrip(".")
            if id(part) not in seen and not is_atom(part):
                seen.add(id(part))
                kept.append(part)
                pending.append((part, path + label))
    return ""


def _safe_parts(value: Any) -> Iterator[Part]:
    try:
        yield from parts(value)
    except Exception:  # noqa: BLE001 - an object that cannot be looked at has no parts to name
        return
