"""What a function is: where it can be imported from, or what its code does."""

from __future__ import annotations

import dis
import hashlib
import os
import sys
import sysconfig
import types
from typing import Any, Dict, FrozenSet, Iterator, Optional, Tuple

_SCRIPTS = ("__main__", "__mp_main__")

_digests: Dict[int, Tuple[Any, str]] = {}  # by id, with the code itself, which keeps the id its own
_globals: Dict[int, Tuple[Any, FrozenSet[str]]] = {}
_library: Optional[Tuple[str, ...]] = None


def library_folders() -> Tuple[str, ...]:
    """Where installed packages and Python itself lie: what has a version."""
    global _library
    if _library is None:
        names = ("stdlib", "platstdlib", "purelib", "platlib")
        paths = {os.path.realpath(sysconfig.get_path(name)) for name in names}
        paths |= {sysconfig.get_path(name) for name in names}
        paths |= {entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))}
        _library = tuple(sorted(os.path.join(path, "") for path in paths if path))
    return _library


def of_library(path: Optional[str]) -> bool:
    """Whether a source file belongs to an installed package. What has no file is Python's own."""
    return path is None or path.startswith(library_folders()) or path.startswith("<frozen")


def importable(value: Any) -> bool:
    """Whether another process gets this class or function, or one it stands in for, by its name."""
    module, name = value.__module__, value.__qualname__
    if module is None or module in _SCRIPTS or "<" in name:
        return False
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return False
    return found is value or not isinstance(value, type)


def code_of_user(function: types.FunctionType) -> str:
    """The digest of a function that no version stands for; nothing for one of a library."""
    code = function.__code__
    return "" if of_library(code.co_filename) else " " + code_digest(code)


def code_digest(code: types.CodeType) -> str:
    """Of what the code does, wherever its file and its line are."""
    known = _digests.get(id(code))
    if known is None:
        parts = [code.co_code, repr((code.co_names, code.co_varnames, code.co_freevars)).encode()]
        for constant in code.co_consts:
            inner = isinstance(constant, types.CodeType)
            parts.append((code_digest(constant) if inner else _constant(constant)).encode())
        whole = hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()
        known = _digests[id(code)] = (code, whole)
    return known[1]


def _constant(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(repr, value))}"
    return f"{type(value).__name__} {value!r}"


def surroundings(function: types.FunctionType) -> Iterator[Tuple[str, Any]]:
    """The variables outside a function that it uses, with their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
    known = function.__globals__
    for name in sorted(_names(function.__code__)):
        if name in known:
            yield name, known[name]


def _names(code: types.CodeType) -> FrozenSet[str]:
    """The global variables that code reads, those of the functions inside it too."""
    known = _globals.get(id(code))
    if known is None:
        names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                names |= _names(constant)
        known = _globals[id(code)] = (code, frozenset(names))
    return known[1]
