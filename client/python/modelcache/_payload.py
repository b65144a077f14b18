"""A call on its way to the loader, and an exception on its way back.

Bytes that only processes of one user write and read: they hold pickles. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import io
import os
import pathlib
import pickle
import sys
import traceback
import types
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Set,
    Tuple,
)

PROTOCOL = 5

# Arguments of these types are the same object wherever they are, or nobody looks.
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, enum.Enum, pathlib.PurePath)
_PLAIN_KINDS = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_TORCH_PLAIN = ("torch.dtype", "torch.device", "torch.Size", "torch.layout")


class Reference(NamedTuple):
    """An argument that came out of the cache, unchanged since."""

    object: Any
    key: str
    model_id: str


class Call(NamedTuple):
    """A call in the loader. `references`: names to (key, model id) of what it needs."""

    context: Dict[str, Any]
    description: Dict[str, Any]
    references: Dict[str, Tuple[str, str]]
    body: bytes


class RemoteTraceback(Exception):
    """Where an exception was raised in the loader; the cause of the one that the caller gets."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


# ---- the call -----------------------------------------------------------------------------------


def encode(
    function: Callable[..., Any],
    args: Tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    references: Optional[Mapping[str, Reference]] = None,
    description: Optional[Mapping[str, Any]] = None,
) -> bytes:
    """The call, and what of this process it may depend on: paths, environment, torch's defaults.

    `references` are sent by name wherever they are in the arguments. `description` goes into the
    entry's metadata as it is, so it holds no secrets: "function" (text) and "parts" (of the key).
    Raises what pickle raises for arguments that cannot travel.
    """
    named = dict(references or {})
    names = {id(reference.object): name for name, reference in named.items()}
    call = (_portable(function), tuple(args), dict(kwargs))
    pickler, body = _dumps(({}, *call), names)
    if pickler.of_script:  # classes and functions of the script: the loader puts them into its own
        of_script = {name: getattr(sys.modules["__main__"], name) for name in pickler.of_script}
        _, body = _dumps((of_script, *call), names)
    keys = {name: (reference.key, reference.model_id) for name, reference in named.items()}
    whole = Call(_context(), dict(description or {}), keys, body)
    return pickle.dumps(tuple(whole), PROTOCOL)


def decode(data: bytes) -> Call:
    return Call._make(pickle.loads(data))


def open_call(
    call: Call, references: Mapping[str, Any]
) -> Tuple[Callable[..., Any], Tuple[Any, ...], Dict[str, Any]]:
    """Function and arguments, with the objects that references stand for."""
    unpickler = _Unpickler(io.BytesIO(call.body))
    unpickler.references = references
    of_script, function, args, kwargs = unpickler.load()
    vars(sys.modules["__main__"]).update(of_script)
    return _callable(function), args, kwargs


def enter(context: Mapping[str, Any]) -> None:
    """Makes this process as that of the caller, as far as a call can see."""
    os.chdir(context["folder"])
    os.environ.clear()
    os.environ.update(context["environment"])
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[:] = context["path"]
    if package not in sys.path:
        sys.path.append(package)
    sys.argv[:] = context["arguments"]
    if context["torch"]:
        _set_torch_defaults(context["torch"])


def argument_objects(args: Tuple[Any, ...], kwargs: Mapping[str, Any]) -> Dict[str, Any]:
    """The objects in the arguments that a result may hold again, by name.

    Both sides name them alike: the loader writes them as names, the caller's own objects take their
    places when the result is loaded.
    """
    found: Dict[str, Any] = {}
    for name, value in _walk(args, kwargs):
        if not _is_plain(value) and type(value) is not tuple:
            found[name] = value
    return found


def argument_paths(args: Tuple[Any, ...], kwargs: Mapping[str, Any]) -> List[str]:
    """The texts in the arguments that name files or folders."""
    texts = [value for _, value in _walk(args, kwargs) if isinstance(value, (str, os.PathLike))]
    found = []
    for text in texts:
        with contextlib.suppress(OSError, TypeError, ValueError):
            if os.path.exists(text):
                found.append(os.fsdecode(text))
    return found


def _walk(args: Tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tuple[str, Any]]:
    """Every argument, and what lies in its lists, tuples and dicts, with a name."""
    pending = [(f"argument {number}", item) for number, item in enumerate(args)]
    pending += [(f"argument {name!r}", kwargs[name]) for name in sorted(kwargs)]
    seen: Set[int] = set()
    while pending:
        name, value = pending.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield name, value
        if isinstance(value, (list, tuple)):
            pending += [(f"{name}[{number}]", item) for number, item in enumerate(value)]
        elif isinstance(value, dict):
            pending += [(f"{name}[{key!r}]", item) for key, item in value.items()]


def _is_plain(value: Any) -> bool:
    if isinstance(value, _PLAIN) or isinstance(value, _PLAIN_KINDS):
        return True
    return f"{type(value).__module__}.{type(value).__qualname__}" in _TORCH_PLAIN


def _portable(function: Callable[..., Any]) -> Any:
    """A method of a class by class and name: the class may be patched here and not there."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type):
        return ("method", owner, function.__name__)
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "")
    is_function = isinstance(function, types.FunctionType) and name.isidentifier()
    if is_function and module != "__main__":
        if callable(getattr(sys.modules.get(module or ""), name, None)):
            return ("function", module, name)
    return ("object", function)


def _callable(portable: Any) -> Callable[..., Any]:
    kind, *where = portable
    if kind == "object":
        return where[0]
    if kind == "method":
        return getattr(*where)
    return getattr(importlib.import_module(where[0]), where[1])


# ---- pickling -----------------------------------------------------------------------------------


def _dumps(value: Any, names: Mapping[int, str]) -> Tuple[Any, bytes]:
    file = io.BytesIO()
    pickler = _pickler_class()(file, PROTOCOL)
    pickler.names = names
    pickler.dump(value)
    return pickler, file.getvalue()


_pickler: Any = None


def _pickler_class() -> Any:
    global _pickler
    if _pickler is None:
        _pickler = _make_pickler_class()
    return _pickler


def _make_pickler_class() -> Any:
    try:
        import cloudpickle

        base: Any = cloudpickle.Pickler
    except ImportError:
        base = pickle.Pickler

    class Pickler(base):
        names: Mapping[int, str] = {}

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.of_script: List[str] = []

        def persistent_id(self, value: Any) -> Optional[str]:
            return self.names.get(id(value))

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, (type, types.FunctionType)) and value.__module__ == "__main__":
                name = value.__qualname__
                if getattr(sys.modules["__main__"], name, None) is value:
                    if name not in self.of_script:
                        self.of_script.append(name)
            inherited = getattr(super(), "reducer_override", None)
            return NotImplemented if inherited is None else inherited(value)

    return Pickler


class _Unpickler(pickle.Unpickler):
    references: Mapping[str, Any] = {}

    def persistent_load(self, name: Any) -> Any:
        return self.references[name]


# ---- what a call may depend on ------------------------------------------------------------------


def _context() -> Dict[str, Any]:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return {
        "folder": os.getcwd(),
        "path": [os.path.abspath(entry) if entry == "" else entry for entry in sys.path],
        "environment": dict(os.environ),
        "arguments": list(sys.argv),
        "script": None if script is None else os.path.abspath(script),
        "torch": _torch_defaults(),
    }


def _torch_defaults() -> Dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    device = getattr(torch, "get_default_device", lambda: "cpu")()
    return {
        "dtype": str(torch.get_default_dtype()).partition(".")[2],
        "device": str(device),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
    }


def _set_torch_defaults(defaults: Mapping[str, Any]) -> None:
    import torch

    torch.set_default_dtype(getattr(torch, defaults["dtype"]))
    if defaults["device"] != "cpu":
        torch.set_default_device(defaults["device"])
    torch.set_grad_enabled(defaults["grad"])
    if defaults["inference"]:
        torch.inference_mode(True).__enter__()


# ---- exceptions ---------------------------------------------------------------------------------


def encode_failure(failure: BaseException) -> bytes:
    """An exception with its traceback as text. Without the exception when it cannot travel."""
    text = "".join(traceback.format_exception(type(failure), failure, failure.__traceback__))
    try:
        body = _dumps(failure, {})[1]
        again = pickle.loads(body)
        if type(again) is not type(failure) or str(again) != str(failure):
            body = b""
    except Exception:  # noqa: BLE001 - any class may have any fault
        body = b""
    return pickle.dumps((body, text), PROTOCOL)


def decode_failure(detail: bytes) -> Optional[BaseException]:
    """The exception, with the loader's traceback as its cause; None when it could not travel."""
    try:
        body, text = pickle.loads(detail)
        failure = pickle.loads(body) if body else None
    except Exception:  # noqa: BLE001 - as above
        return None
    if isinstance(failure, BaseException):
        failure.__cause__ = RemoteTraceback(text)
        return failure
    return None
