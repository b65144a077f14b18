"""Objects that pickle and cloudpickle do not take as they are, or not quickly enough.

The functions that make them again are named in streams.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import marshal
import os
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Tuple

import torch
from torch.nn.modules.module import _WrappedHook as WrappedHook
from torch.nn.utils import parametrize
from torch.nn.utils.weight_norm import WeightNorm

from modelcache import _serialise_quirks as quirks
from modelcache import _serialise_script as script

if TYPE_CHECKING:
    from modelcache._serialise_pickler import Pickler

# Packages of code that came with a model folder, and what makes them importable.
REMOTE_CODE = {
    "transformers_modules": "transformers.dynamic_module_utils",
    "diffusers_modules": "diffusers.utils.dynamic_modules_utils",
}

STABLE_FAST = "sfast"

_HOOK_TABLES = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_COMPILED = "a compiled module cannot travel: compile it after loading"
_MEMBER_TABLES = ("_parameters", "_buffers", "_modules")


_Lock = type(threading.Lock())


class Refused(Exception):
    """An object cannot travel. The path to it is found by whoever catches this."""


# ---- modules ------------------------------------------------------------------------------------

# What nn.Module.__setstate__ does for states of old versions costs more than all the rest. This is
# the whole of it for a state of this version, without any Python: module.__dict__ = state.
assign_state: Callable[[Any, Dict[str, Any]], None] = torch.nn.Module.__dict__["__dict__"].__set__


class _Name:
    """An attribute's name: rebuilt as the interned string that attribute access is quick with."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Names:
    """One _Name for each text, so that the pickle has each once."""

    def __init__(self) -> None:
        self._names: Dict[str, _Name] = {}

    def keys(self, table: Dict[Any, Any]) -> Dict[Any, Any]:
        names = self._names
        return {
            (names.get(key) or names.setdefault(key, _Name(key))) if type(key) is str else key: item
            for key, item in table.items()
        }


class _AssignState:
    """Stands for `assign_state` in a pickle."""

    __call__ = staticmethod(assign_state)


_ASSIGN_STATE = _AssignState()


def _assign_state() -> Callable[[Any, Dict[str, Any]], None]:
    return assign_state


_GET_STATE = (
    getattr(object, "__getstate__", None),
    getattr(torch.nn.Module, "__getstate__", None),
)


def _has_default_pickling(kind: type) -> bool:
    return (
        kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and getattr(kind, "__getstate__", None) in _GET_STATE
        and kind.__setstate__ is torch.nn.Module.__setstate__  # type: ignore[attr-defined]
        and not hasattr(kind, "__getnewargs__")
        and not hasattr(kind, "__getnewargs_ex__")
        and not copyreg._slotnames(kind)
    )


def _reduce_module(pickler: "Pickler", module: torch.nn.Module) -> Any:
    kind = type(module)
    if kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch."):
        raise Refused(_COMPILED)
    if isinstance(module, torch.jit.ScriptModule):
        return script.reduce_module(pickler, module)
    if _is_parametrized(kind):
        return (_new, (kind.__base__,), _module_state(pickler, module), None, None, _parametrize)
    if not _has_default_pickling(kind):
        return NotImplemented
    state = _module_state(pickler, module)
    if any(isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values()):
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                _drop(state, hook.name)
        return (copyreg.__newobj__, (kind,), state, None, None, _derive_weights)
    return (copyreg.__newobj__, (kind,), state, None, None, _ASSIGN_STATE)


def _module_state(pickler: "Pickler", module: torch.nn.Module) -> Dict[Any, Any]:
    state = dict(module.__dict__)
    if state.pop("_compiled_call_impl", None) is not None:
        raise Refused(_COMPILED)
    for table in _HOOK_TABLES:
        hooks = [key for key in state.get(table) or () if type(key) is int]
        pickler.hook_id = max([pickler.hook_id, *hooks])
    for table in _MEMBER_TABLES:
        if type(state.get(table)) is dict:
            state[table] = pickler.names.keys(state[table])
    return pickler.names.keys(state)


def _drop(state: Dict[Any, Any], name: str) -> None:
    for key in list(state):
        if isinstance(key, _Name) and key.text == name:
            del state[key]


def _is_parametrized(kind: type) -> bool:
    return kind.__module__ == parametrize.__name__ and kind.__name__.startswith("Parametrized")


def _new(kind: type) -> Any:
    return kind.__new__(kind)


def _parametrize(module: torch.nn.Module, state: Dict[str, Any]) -> None:
    assign_state(module, state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)


def _derive_weights(module: torch.nn.Module, state: Dict[str, Any]) -> None:
    assign_state(module, state)
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            setattr(module, hook.name, hook.compute_weight(module))


# ---- functions and classes ----------------------------------------------------------------------


def found_at(module: Optional[str], path: str) -> Any:
    """What a loaded module has under a dotted name, None when it has nothing."""
    found: Any = sys.modules.get(module or "")
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def find(module: str, path: str) -> Any:
    importlib.import_module(module)
    return found_at(module, path)


def is_importable(value: Any) -> bool:
    """True when a function or class is what its module has under its name."""
    return found_at(value.__module__, value.__qualname__) is value


def _note_remote_code(pickler: "Pickler", module: Optional[str]) -> None:
    package, *inner = (module or "").split(".")
    if package == STABLE_FAST:
        pickler.packages[package] = ""
    if package in REMOTE_CODE and package not in pickler.packages:
        folder = os.path.dirname(sys.modules[module or ""].__file__ or "")
        for _ in inner:
            folder = os.path.dirname(folder)
        pickler.packages[package] = folder


def _reduce_class(pickler: "Pickler", kind: type) -> Any:
    _note_remote_code(pickler, kind.__module__)
    if kind.__module__ == "__main__" and is_importable(kind):
        return kind.__qualname__
    return NotImplemented


_FUNCTION_STATE = (
    "__module__",
    "__name__",
    "__qualname__",
    "__kwdefaults__",
    "__doc__",
    "__dict__",
    "__annotations__",
)


def _reduce_function(pickler: "Pickler", function: types.FunctionType) -> Any:
    _note_remote_code(pickler, function.__module__)
    if is_importable(function):
        return function.__qualname__
    home = function.__globals__.get("__name__")  # __module__ may be that of a function it wraps
    module = sys.modules.get(home or "")
    if module is None or home != "__main__" and function.__globals__ is not vars(module):
        return NotImplemented
    if home.partition(".")[0] == STABLE_FAST:
        pickler.packages[STABLE_FAST] = ""
        pickler.fresh_locks += filter(_is_free, map(_contents, function.__closure__ or ()))
    code = marshal.dumps(function.__code__)
    arguments = (code, home, function.__defaults__, function.__closure__)
    state = {name: getattr(function, name) for name in _FUNCTION_STATE}
    return (_make_function, arguments, state, None, None, _set_function)


def _make_function(
    code: bytes, module: str, defaults: Any, closure: Optional[Tuple[types.CellType, ...]]
) -> types.FunctionType:
    """A function that lives in the module it was written in, as the first one did."""
    home = vars(importlib.import_module(module))
    return types.FunctionType(marshal.loads(code), home, None, defaults, closure)


def _set_function(function: types.FunctionType, state: Dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(function, name, value)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_free(value: Any) -> bool:
    return type(value) is _Lock and not value.locked()


def _reduce_lock(pickler: "Pickler", lock: Any) -> Any:
    """One that is known to guard nothing while no call runs is made anew."""
    if any(known is lock for known in pickler.fresh_locks):
        return (threading.Lock, ())
    return NotImplemented


def _reduce_cell(cell: types.CellType) -> Any:
    try:
        contents = cell.cell_contents
    except ValueError:
        return (_new_cell, ())
    return (_new_cell, (), (contents,), None, None, _set_cell)


def _new_cell() -> types.CellType:
    return types.CellType()


def _set_cell(cell: types.CellType, contents: Tuple[Any]) -> None:
    cell.cell_contents = contents[0]


def _reduce_method(pickler: "Pickler", method: types.MethodType) -> Any:
    """Not by name: what the object has under that name may be this very method, or another."""
    return (_new_method, (method.__func__, method.__self__))


def _reduce_builtin_method(pickler: "Pickler", method: types.BuiltinMethodType) -> Any:
    owner = method.__self__
    if owner is None or isinstance(owner, (type, types.ModuleType)):
        return NotImplemented
    return (_bound, (type(owner), method.__name__, owner))


def _bound(kind: type, name: str, owner: Any) -> Any:
    """A method of the class: the object may have another of that name."""
    return getattr(kind, name).__get__(owner, kind)


def _new_method(function: Any, owner: Any) -> types.MethodType:
    return types.MethodType(function, owner)


# ---- single objects -----------------------------------------------------------------------------


def _reduce_sentinel(pickler: "Pickler", value: object) -> Any:
    """A bare object() is told by its identity: it must be that of the module that defines it."""
    for name, module in list(sys.modules.items()):
        for attribute, found in list(getattr(module, "__dict__", {}).items()):
            if found is value:
                return (find, (name, attribute))
    return NotImplemented


def _reduce_weak(pickler: "Pickler", value: "weakref.ref[Any]") -> Any:
    if value.__callback__ is not None:
        raise Refused("a weak reference with a callback cannot travel")
    target = value()
    if target is None:
        raise Refused("a dead weak reference cannot travel")
    return (weakref.ref, (target,))


def _reduce_wrapped_hook(pickler: "Pickler", hook: WrappedHook) -> Any:
    """With all its attributes: its own state leaves out those that wrapping a function gave it."""
    return (copyreg.__newobj__, (WrappedHook,), dict(hook.__dict__), None, None, _set_attributes)


def _set_attributes(value: Any, attributes: Dict[str, Any]) -> None:
    value.__dict__.update(attributes)


def _reduce_local(pickler: "Pickler", value: threading.local) -> Any:
    """What the loading thread has put there; a direct load would have done it in the caller's."""
    return (threading.local, (), dict(value.__dict__))


def _reduce_tokenizer(pickler: "Pickler", value: Any) -> Any:
    """Its own state has nothing of what Python hung on it, as transformers does."""
    make, arguments, state = value.__reduce_ex__(4)[:3]
    return (_restored, (make, arguments, state), dict(value.__dict__), None, None, _set_attributes)


def _restored(make: Callable[..., Any], arguments: Tuple[Any, ...], state: Any) -> Any:
    value = make(*arguments)
    value.__setstate__(state)
    return value


def _reduce_offload(pickler: "Pickler", value: Any) -> Any:
    if value.index:
        raise Refused(f"{next(iter(value.index))} is offloaded to disk, in {value.save_folder}")
    return NotImplemented


_BY_TYPE: Dict[type, Callable[["Pickler", Any], Any]] = {
    types.FunctionType: _reduce_function,
    types.MethodType: _reduce_method,
    types.BuiltinMethodType: _reduce_builtin_method,
    WrappedHook: _reduce_wrapped_hook,
    _Lock: _reduce_lock,
    types.CellType: lambda pickler, value: _reduce_cell(value),
    object: _reduce_sentinel,
    weakref.ref: _reduce_weak,
    threading.local: _reduce_local,
    _Name: lambda pickler, value: (sys.intern, (value.text,)),
    _AssignState: lambda pickler, value: (_assign_state, ()),
    torch.jit.ScriptFunction: script.reduce_function,
}
_BY_NAME: Dict[Tuple[str, str], Callable[["Pickler", Any], Any]] = {
    ("tokenizers", "Tokenizer"): _reduce_tokenizer,
    ("accelerate.utils.offload", "OffloadedWeightsLoader"): _reduce_offload,
}


def reduce(pickler: "Pickler", value: Any) -> Any:
    """As Pickler.reducer_override, for what is not a tensor."""
    kind = type(value)
    reducer = _BY_TYPE.get(kind) or _BY_NAME.get((kind.__module__, kind.__name__))
    if reducer is not None:
        return reducer(pickler, value)
    if isinstance(value, torch.nn.Module):
        return _reduce_module(pickler, value)
    if isinstance(value, type):
        return _reduce_class(pickler, value)
    if isinstance(value, io.IOBase) and kind not in (io.BytesIO, io.StringIO):
        raise Refused("an open file cannot travel")
    return NotImplemented


# ---- before a stream is loaded ------------------------------------------------------------------


def prepare(packages: Dict[str, str], hook_id: int) -> None:
    """Makes remote code importable, and keeps later hooks from taking the place of loaded ones."""
    for package, folder in packages.items():
        if package == STABLE_FAST:
            quirks.stable_fast()
            continue
        importlib.import_module(REMOTE_CODE[package]).init_hf_modules()
        if folder not in sys.path:
            sys.path.append(folder)
        importlib.invalidate_caches()
    handle = torch.utils.hooks.RemovableHandle
    handle.next_id = max(handle.next_id, hook_id + 1)
