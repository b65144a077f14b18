"""Values as canonical text: equal text for equal values, in every process; unequal for unequal ones.

Nothing here asks a value for its hash or compares two values, so a value need have neither.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import io
import os
import pathlib
import re
import sys
import types
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

from modelcache import _key_functions

_LONG = 200  # texts longer than this are kept as their digest
_SECRET = re.compile(r"(^|_)(token|auth|secret|password|passwd|credential|api_key)s?($|_)", re.IGNORECASE)
_NO_SECRET = re.compile(r"tokeniz|(bos|eos|pad|unk|sep|cls|mask|special|added|num|max|min|new)_|_ids?$")
_TOKEN_TEXT = re.compile(r"\bhf_[A-Za-z0-9]{16,}\b|://[^/\s@]+:[^/\s@]+@")
_TORCH_TEXTS = {"dtype", "device", "layout", "memory_format", "qscheme"}


class Unkeyable(Exception):
    """A call that no key can stand for: `path` says which part of it, `why` the reason, `kind` in a
    word what warnings are told apart by."""

    def __init__(self, path: str, why: str, kind: str = "arguments") -> None:
        super().__init__(f"{path}: {why}" if path else why)
        self.path = path
        self.why = why
        self.kind = kind


class Reference(NamedTuple):
    """An argument that came out of the cache and is what it was."""

    object: Any
    key: str
    model_id: str


# What says whether an object came out of the cache. Raises Unkeyable for one that was edited since.
Lookup = Callable[[Any, str], Optional[Reference]]


def digest(text: str) -> str:
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def hidden(value: Any) -> str:
    """A secret as what shows only whether it is the same one."""
    if value is None or isinstance(value, bool):
        return repr(value)
    return "hidden:" + digest("secret " + (value if isinstance(value, str) else repr(value)))[:16]


def is_secret(name: str) -> bool:
    """Whether a parameter or variable of that name holds what nobody else may read."""
    return bool(_SECRET.search(name)) and not _NO_SECRET.search(name)


class Writer:
    """Writes values of one call. `paths` is "same" where the result cannot depend on how a path is
    spelled, "text" where a path counts as its text, whatever its type, and "type" elsewhere."""

    def __init__(self, lookup: Optional[Lookup] = None, paths: str = "type") -> None:
        self.references: Dict[str, Reference] = {}
        self.relative = False  # whether a path among the values depends on the working folder
        self._lookup = lookup
        self._paths = paths
        self._open: List[int] = []

    def text(self, value: Any, where: str) -> str:
        """The text of a value; `where` names it in what Unkeyable says."""
        write = _EXACT.get(type(value))
        return write(self, value, where) if write is not None else self._other(value, where)

    def short(self, value: Any, where: str) -> str:
        """The text, or its beginning and its digest where it is long."""
        text = self.text(value, where)
        return text if len(text) <= _LONG else f"{text[: _LONG // 2]}… {digest(text)}"

    # ---- texts and paths ------------------------------------------------------------------------

    def string(self, value: str, where: str) -> str:
        if _TOKEN_TEXT.search(value):
            return hidden(value)
        if self._is_path(value):
            return self._path(value)
        return repr(value)

    def path(self, value: Any, where: str) -> str:
        text = os.fspath(value)
        if self._paths != "type":
            return self.string(text, where)
        return f"{type(value).__name__}({self._path(text)})"

    def _is_path(self, value: str) -> bool:
        if not value or len(value) > 4096:
            return False
        try:
            os.stat(value)
        except (OSError, ValueError):
            return False
        return True

    def _path(self, value: str) -> str:
        if self._paths == "same":
            return f"path {os.path.realpath(value)!r}"
        if os.path.isabs(value):
            return repr(value)
        self.relative = True
        return f"{value!r} in {os.getcwd()!r}"

    # ---- containers -----------------------------------------------------------------------------

    def sequence(self, value: Any, where: str) -> str:
        with _Nested(self, value) as known:
            if known:
                return known
            items = [self.text(item, f"{where}[{number}]") for number, item in enumerate(value)]
        left, right = "[]" if type(value) is list else "()"
        return left + ", ".join(items) + right

    def mapping(self, value: Dict[Any, Any], where: str) -> str:
        with _Nested(self, value) as known:
            return known or "{" + ", ".join(self._items(value, where)) + "}"

    def _items(self, value: Dict[Any, Any], where: str) -> List[str]:
        result = []
        for key, item in value.items():
            if isinstance(key, str) and is_secret(key):
                text = hidden(item)
            else:
                text = self.text(item, f"{where}[{key!r}]")
            result.append(f"{self.text(key, where)}: {text}")
        return result

    def unordered(self, value: Any, where: str) -> str:
        items = sorted(self.text(item, where) for item in value)
        return f"{type(value).__name__}({', '.join(items)})"

    def data(self, value: Any, where: str) -> str:
        if len(value) <= _LONG:
            return repr(value)
        whole = hashlib.blake2b(value, digest_size=16).hexdigest()
        return f"{type(value).__name__} of {len(value)} bytes {whole}"

    # ---- everything else ------------------------------------------------------------------------

    def _other(self, value: Any, where: str) -> str:
        if self._lookup is not None:
            reference = self._lookup(value, where)
            if reference is not None:
                self.references[where] = reference
                return f"cached {reference.key} {reference.model_id}"
        kind = type(value)
        if isinstance(value, enum.Enum):
            return f"{_name(kind)}.{value.name}"
        if isinstance(value, type):
            return self._class(value, where)
        if isinstance(value, types.FunctionType):
            return self.function(value, where)
        if isinstance(value, types.MethodType):
            return f"{self.function(value.__func__, where)} of {self.text(value.__self__, where)}"
        if isinstance(value, types.BuiltinFunctionType):
            return f"{value.__module__}:{value.__qualname__}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, pathlib.PurePath):
            return self.path(value, where)
        if kind.__module__ == "torch":
            known = self._torch(value, where)
            if known:
                return known
        _refuse_live(value, where)
        if kind.__module__ == "numpy" and kind.__name__ == "ndarray" and not value.dtype.hasobject:
            return f"ndarray {value.dtype.str} {value.shape} {_hash(value.tobytes())}"
        return self._reduced(value, where)

    def _torch(self, value: Any, where: str) -> Optional[str]:
        torch = sys.modules["torch"]
        if type(value).__name__ in _TORCH_TEXTS:
            return f"{type(value).__name__} {value}"
        if isinstance(value, torch.Size):
            return f"Size {tuple(value)}"
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_quantized:
            return None
        described = (str(value.dtype), tuple(value.shape), value.stride(), value.requires_grad)
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b""
        return f"tensor {described} {value.device} {_hash(data)}"

    def _class(self, value: type, where: str) -> str:
        if _key_functions.importable(value):
            return f"class {_name(value)}"
        with _Nested(self, value) as known:
            if known:
                return known
            members = [self.text(base, where) for base in value.__bases__]
            for name, member in sorted(vars(value).items()):
                if name not in _CLASS_NOISE:
                    member = getattr(member, "__func__", member)
                    members.append(f"{name}={self._member(member, f'{where}.{name}')}")
        return f"class {_name(value)} {digest(' '.join(members))}"

    def _member(self, member: Any, where: str) -> str:
        if isinstance(member, property):
            parts = [member.fget, member.fset, member.fdel]
            return self.text(parts, where)
        try:
            return self.text(member, where)
        except Unkeyable:  # slots, locks and the like: the code around them is in the text
            return _name(type(member))

    def function(self, value: types.FunctionType, where: str) -> str:
        """A function by name, and by what it does where the name alone does not say."""
        name = f"{value.__module__}:{value.__qualname__}"
        if _key_functions.importable(value):
            return name + _key_functions.code_of_user(value)
        with _Nested(self, value) as known:
            if known:
                return known
            parts = [_key_functions.code_digest(value.__code__)]
            parts.append(self.text(value.__defaults__, where))
            parts.append(self.text(value.__kwdefaults__, where))
            for used, item in _key_functions.surroundings(value):
                parts.append(f"{used}={self.text(item, f'{where}, which uses {used}')}")
        return f"{name} {digest(' '.join(parts))}"

    def _reduced(self, value: Any, where: str) -> str:
        """As pickle would write it, step by step."""
        with _Nested(self, value) as known:
            if known:
                return known
            reduced = _reduce(value, where)
            if isinstance(reduced, str):
                return f"{_name(type(value))} {reduced}"
            make, made_of, state, items, pairs = (*reduced, None, None, None)[:5]
            parts = [self.text(make, where), self.text(made_of, where)]
            if state is not None:
                parts.append(self._state(state, where))
            if items is not None:
                parts.append(self.sequence(list(items), where))
            if pairs is not None:
                parts.append(self.mapping(dict(pairs), where))
        return f"{_name(type(value))}({' '.join(parts)})"

    def _state(self, state: Any, where: str) -> str:
        if type(state) is not dict:
            return self.text(state, where)
        named = {str(name): item for name, item in state.items()}
        parts = []
        for name in sorted(named):
            shown = hidden(named[name]) if is_secret(name) else self.text(named[name], f"{where}.{name}")
            parts.append(f"{name}={shown}")
        return " ".join(parts)


_CLASS_NOISE = {
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__module__",
    "__static_attributes__",
    "__weakref__",
}


class _Nested:
    """Marks a value as being written; gives a text instead for one that is being written already."""

    def __init__(self, writer: Writer, value: Any) -> None:
        self._stack = writer._open
        self._id = id(value)

    def __enter__(self) -> str:
        if self._id in self._stack:
            self._stack.append(0)
            return f"<level {self._stack.index(self._id)}>"
        self._stack.append(self._id)
        return ""

    def __exit__(self, *_: object) -> None:
        self._stack.pop()


def _float(writer: Writer, value: float, where: str) -> str:
    return repr(value)


def _plain(writer: Writer, value: Any, where: str) -> str:
    return repr(value)


_EXACT: Dict[type, Callable[[Writer, Any, str], str]] = {
    type(None): _plain,
    bool: _plain,
    int: _plain,
    float: _plain,
    complex: _plain,
    type(Ellipsis): _plain,
    range: _plain,
    str: Writer.string,
    bytes: Writer.data,
    bytearray: Writer.data,
    list: Writer.sequence,
    tuple: Writer.sequence,
    dict: Writer.mapping,
    set: Writer.unordered,
    frozenset: Writer.unordered,
    pathlib.PosixPath: Writer.path,
}


def _name(kind: Any) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _hash(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _reduce(value: Any, where: str) -> Any:
    try:
        return value.__reduce_ex__(4)
    except Exception as failure:  # noqa: BLE001 - any class may have any fault
        kind = _name(type(value)).replace("builtins:", "")
        why = f"a {kind} has no content that a key can have ({type(failure).__name__}: {failure})"
        raise Unkeyable(where, why) from None


def _refuse_live(value: Any, where: str) -> None:
    """Raises for what is more than its content: the call reads from it, or its result is it."""
    if isinstance(value, io.IOBase):
        raise Unkeyable(where, "an open file is read from where it stands, and moved")
    if isinstance(value, types.GeneratorType):
        raise Unkeyable(where, "a generator can be read once")
    kind = type(value)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "nn"):
        if isinstance(value, (torch.nn.Module, torch.Generator)):
            raise Unkeyable(where, f"a {kind.__qualname__} that did not come from the cache")
    if hasattr(kind, "from_pretrained") and not hasattr(kind, "to_dict"):
        raise Unkeyable(where, f"a {kind.__qualname__} that did not come from the cache")
