"""Puts the cache in the place of loading functions, in every library when it is imported.

Importing this, and calling `patch_all`, imports no library: a finder waits for the modules that hold
the functions. Those that are imported already are patched at once.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import threading
import types
import warnings
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from modelcache import _patch_points
from modelcache._patch_points import Point

_MARK = "__modelcache_original__"

_pending: Dict[str, List[Point]] = {}  # by module
_undo: List[Callable[[], None]] = []  # in the order of what they undo
_done: Set[Point] = set()
_watched: Dict[type, Set[str]] = {}  # classes, and the methods of subclasses that are covered
_lock = threading.RLock()


def patch_all(*libraries: str) -> None:
    """Makes loading functions go through the cache: of the named libraries, by default of all.

    Known are torch, safetensors, transformers, diffusers, torchvision, open_clip, peft and
    sentence_transformers; more points come from `patch` in [tool.modelcache] of the nearest pyproject.toml
    and from overmind.cfg beside the caller. Nothing is imported: what is not imported yet is patched when
    it is. Calling it again does nothing. Raises ValueError for a library or a point that makes no sense.
    """
    points = _patch_points.of_libraries(libraries)
    if not libraries:
        points += _patch_points.of_users(sys._getframe(1).f_code.co_filename)
    _add(points)


def patch(point: str) -> None:
    """Makes one more function go through the cache: "package.module:function" or "…:Class.method"."""
    _add([_patch_points.parse(point)])


def unpatch_all() -> None:
    """Puts every function back. Names imported meanwhile call the originals from now on."""
    with _lock:
        _pending.clear()
        _done.clear()
        while _undo:
            _undo.pop()()
        if _finder in sys.meta_path:
            sys.meta_path.remove(_finder)


def _add(points: List[Point]) -> None:
    with _lock:
        for point in points:
            if point in _done:
                continue
            _done.add(point)
            module = sys.modules.get(point.module)
            if module is None or _importing(module):
                _pending.setdefault(point.module, []).append(point)
            else:
                _apply(module, point)
        if _pending and _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)


def _importing(module: types.ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


# ---- waiting for modules ------------------------------------------------------------------------


class _Finder:
    """Finds nothing itself: has the loaders of awaited modules tell when they are done."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _pending:
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _tell_when_loaded(spec.loader, name)
                return spec
        return None


_finder: Any = _Finder()


def _tell_when_loaded(loader: Any, name: str) -> None:
    execute = loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        if module.__name__ == name:
            loader.__dict__.pop("exec_module", None)
        execute(module)
        if module.__name__ == name:
            _loaded(module)

    try:
        loader.exec_module = exec_module
    except AttributeError:  # one without attributes of its own: its module stays as it is
        return


def _loaded(module: types.ModuleType) -> None:
    with _lock:
        for point in _pending.pop(module.__name__, []):
            _apply(module, point)


# ---- patching -----------------------------------------------------------------------------------


def _apply(module: types.ModuleType, point: Point) -> None:
    owner: Any = module
    try:
        for part in point.path[:-1]:
            owner = getattr(owner, part)
        inspect.getattr_static(owner, point.path[-1])
    except AttributeError:
        if point.own:
            warnings.warn(f"modelcache: there is no {point} to patch", stacklevel=4)
        return
    if isinstance(owner, type):
        _patch_class(owner, point.path[-1])
    else:
        _patch_function(owner, point.path[-1])


def _patch_function(module: Any, name: str) -> None:
    function = getattr(module, name)
    if not callable(function) or hasattr(function, _MARK) or isinstance(function, type):
        return
    wrapper = _wrapper_of_function(function)
    for holder, held in _holders(function):
        setattr(holder, held, wrapper)
        _undo.append(functools.partial(_put_back, holder, held, wrapper, function))


def _holders(function: Any) -> List[Tuple[Any, str]]:
    """Every module and name that has the function, as `from module import function` leaves it.

    Modules that another took the place of in sys.modules, as lazy ones do, count as long as a module
    has them.
    """
    found = []
    pending = list(sys.modules.values())
    seen = set(map(id, pending))
    for module in pending:
        names = getattr(module, "__dict__", None)
        if type(names) is not dict:
            continue
        for name, value in list(names.items()):
            if value is function:
                found.append((module, name))
            elif isinstance(value, types.ModuleType) and id(value) not in seen:
                seen.add(id(value))
                pending.append(value)
    return found


def _put_back(holder: Any, name: str, wrapper: Any, function: Any) -> None:
    if vars(holder).get(name) is wrapper:
        setattr(holder, name, function)


def _patch_class(owner: type, name: str) -> None:
    _patch_method(owner, name)
    for kind in _below(owner):
        if name in vars(kind):
            _patch_method(kind, name)
    _watch_subclasses(owner, name)


def _below(owner: type) -> List[type]:
    found: List[type] = []
    pending = [owner]
    while pending:
        for kind in type.__subclasses__(pending.pop()):
            if kind not in found:
                found.append(kind)
                pending.append(kind)
    return found


def _patch_method(owner: type, name: str) -> None:
    descriptor = inspect.getattr_static(owner, name)
    function = getattr(descriptor, "__func__", descriptor)
    if hasattr(function, _MARK) or not callable(function):
        return
    kind = type(descriptor) if isinstance(descriptor, (classmethod, staticmethod)) else None
    wrapper: Any = _wrapper_of_method(descriptor, function, name, kind)
    own = name in vars(owner)
    setattr(owner, name, wrapper)
    put = vars(owner)[name]

    def undo() -> None:
        if vars(owner).get(name) is put:
            if own:
                setattr(owner, name, descriptor)
            else:
                delattr(owner, name)

    _undo.append(undo)


def _watch_subclasses(owner: type, name: str) -> None:
    """Subclasses made from now on that have the method anew are covered too."""
    watched = _watched.get(owner)
    if watched is not None:
        watched.add(name)
        return
    names = _watched[owner] = {name}
    own = vars(owner).get("__init_subclass__")

    def __init_subclass__(cls: type, **arguments: Any) -> None:
        if own is not None:
            own.__get__(None, cls)(**arguments)
        else:
            super(owner, cls).__init_subclass__(**arguments)
        for each in names:
            if each in vars(cls):
                _patch_method(cls, each)

    owner.__init_subclass__ = put = classmethod(__init_subclass__)  # type: ignore[assignment]

    def undo() -> None:
        _watched.pop(owner, None)
        if vars(owner).get("__init_subclass__") is put:
            if own is not None:
                owner.__init_subclass__ = own
            else:
                del owner.__init_subclass__

    _undo.append(undo)


# ---- what is put in their places ----------------------------------------------------------------


def _wrapper_of_function(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _call(function, args, kwargs)

    setattr(call, _MARK, function)
    return call


def _wrapper_of_method(descriptor: Any, function: Any, name: str, kind: Optional[type]) -> Any:
    if kind is staticmethod:
        return staticmethod(_wrapper_of_function(function))

    @functools.wraps(function)
    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        bound = descriptor.__get__(None, owner) if kind else descriptor.__get__(owner, type(owner))
        cls = owner if kind else type(owner)
        if not _covered(cls, name):
            return _uncovered(bound, cls, name)(*args, **kwargs)
        return _call(bound, args, kwargs)

    setattr(call, _MARK, descriptor)
    return classmethod(call) if kind else call


def _covered(cls: type, name: str) -> bool:
    """Whether the class's own method is one of ours: a loader calls that, whatever called us."""
    found = inspect.getattr_static(cls, name)
    return hasattr(getattr(found, "__func__", found), _MARK)


def _uncovered(bound: Callable[..., Any], cls: type, name: str) -> Callable[..., Any]:
    from modelcache import _cached

    return functools.partial(_cached.overridden, bound, f"{cls.__module__}:{cls.__qualname__}.{name}")


def _call(function: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    if not _done:  # unpatched, and somebody kept the name
        return function(*args, **kwargs)
    from modelcache import _cached

    return _cached.call(function, args, kwargs)
