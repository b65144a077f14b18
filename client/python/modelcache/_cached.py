"""Calls through the cache: found, made by a loader, or made here when the cache cannot help.

The order of events of one call: its key (_key), the entry of that key (_entry), its files as they were
(_files), the object over its memory (_serialise). Whatever of ours fails leads to a direct call and one
warning for each kind of reason, or to UncachedError with MODELCACHE_STRICT=1.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
import weakref
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

from modelcache import _client, _entry, _errors, _files, _key
from modelcache._key import Call, Reference, Unkeyable
from modelcache._uncached import UncachedError, UncachedWarning, disabled, is_off, is_set

_RETRY_SECONDS = 10.0  # after no daemon answered
_START = "import runpy; runpy.run_module('modelcache.loader', run_name='__main__')"
_COMPARED = 4  # entries of the same function that a miss is compared with


class Origin(NamedTuple):
    """Where an object came from, and why it was or was not resident."""

    function: str
    hit: bool
    reason: str
    call: Optional[Call]
    entry: Optional["_entry.Entry"]
    references: Mapping[str, Any]  # objects of the caller inside it


_origins: Dict[int, Tuple[Any, bool, Origin]] = {}  # by id of an anchor, with a weak reference to it
_warned: Set[Tuple[str, ...]] = set()
_unavailable_until = 0.0


# ---- what users call ----------------------------------------------------------------------------




def original(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind one that was patched: a method with the same owner."""
    inner = getattr(function, "__func__", function)
    behind = getattr(inner, "__modelcache_original__", None)
    if behind is None:
        return function
    if inner is function:
        return behind
    owner = function.__self__
    return behind.__get__(None, owner) if isinstance(owner, type) else behind.__get__(owner, type(owner))


def why(obj: Any) -> Dict[str, Any]:
    """Where an object came from: "state" (hit, miss, uncached or unknown), "reason", and more."""
    found = _origins.get(id(_anchor(obj)))
    if found is None or found[0]() is not _anchor(obj):
        return {"state": "unknown", "reason": "it did not come from a call through the cache"}
    origin = found[2]
    state = "uncached" if origin.entry is None else "hit" if origin.hit else "miss"
    answer: Dict[str, Any] = {"state": state, "reason": origin.reason, "function": origin.function}
    if origin.call is not None:
        answer.update(key=origin.call.key, parts=dict(origin.call.parts))
    if origin.entry is not None:
        answer["model_id"] = origin.entry.model_id
    return answer


# ---- one call -----------------------------------------------------------------------------------


def call(function: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    """The result of a call, through the cache when it can help."""
    if is_off():
        return function(*args, **kwargs)
    try:
        return _through(function, args, kwargs)
    except _Direct as direct:
        reason = direct
    return _directly(function, args, kwargs, reason)


def overridden(function: Callable[..., Any], shown: str, *args: Any, **kwargs: Any) -> Any:
    """A call to what a class has put its own method over, which nothing of ours stands in for."""
    if is_off():
        return function(*args, **kwargs)
    reason = "the class got a method of its own after it was made, which would be called in its place"
    return _directly(function, args, kwargs, _Direct("override", reason, shown))


class _Direct(Exception):
    """The cache cannot help: `kind` of reason, the reason itself, and what a warning is told apart by."""

    def __init__(self, kind: str, reason: str, *which: str, call: Optional[Call] = None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.which = (kind, *which)
        self.call = call


def _through(function: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    try:
        described = _key.describe(function, args, kwargs, _lookup)
    except Unkeyable as failure:
        raise _Direct(failure.kind, str(failure), _shown(function), failure.path) from None
    except _key.DoesNotFit:  # the function says so itself
        return function(*args, **kwargs)
    try:
        entry, reason = _find_or_make(described, function, args, kwargs)
    except _errors.Error as failure:
        raised = _reason_of(failure, described)
    else:
        return _rebuilt(described, entry, reason, args, kwargs)
    raise raised  # outside: an exception of the call itself has nothing of ours around it


def _find_or_make(
    described: Call, function: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Tuple["_entry.Entry", str]:
    client = _connected()
    entry = _entry.find(client, described.key)
    stale, changed = None, ""
    if entry is not None:
        changed = _files.check(entry.metadata["python"]["files"]) or ""
        if not changed:
            return entry, entry.reason
        stale = entry.model_id
        entry.close()
    reason = changed or _miss(client, described)
    return _make(client, described, function, args, kwargs, stale, reason), reason


def _make(
    client: "_client.Client",
    described: Call,
    function: Callable[..., Any],
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
    stale: Optional[str],
    reason: str,
) -> "_entry.Entry":
    from modelcache import _payload

    description = {"function": described.function, "parts": described.parts}
    try:
        payload = _payload.encode(
            function, args, kwargs, references=described.references, description=description
        )
    except Exception as failure:  # noqa: BLE001 - whatever pickling somebody's class raises
        text = f"its arguments cannot travel ({type(failure).__name__}: {failure})"
        raise _Direct("arguments", text, described.function, call=described) from None
    return _entry.make(
        client,
        described.key,
        name=described.function,
        arguments=_loader_command(),
        environment=_loader_environment(),
        folder=os.getcwd(),
        payload=payload,
        stale=stale,
        stale_reason=reason if stale else "",
        progress=_progress(),
    )


def _rebuilt(
    described: Call,
    entry: "_entry.Entry",
    reason: str,
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
) -> Any:
    from modelcache import _serialise

    references = _own_objects(described, args, kwargs)
    try:
        obj = _serialise.load_entry(entry, references)
    except Exception as failure:  # noqa: BLE001 - whatever unpickling somebody's class raises
        text = f"it cannot be made again here ({type(failure).__name__}: {failure})"
        raise _Direct("uncacheable", text, described.function, call=described) from failure
    _remember(obj, Origin(described.function, entry.hit, reason, described, entry, references))
    return obj


def _own_objects(described: Call, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """The caller's objects that a result may hold, by the names that the loader wrote for them."""
    from modelcache import _payload

    own = dict(_payload.argument_objects(args, kwargs))
    own.update({name: reference.object for name, reference in described.references.items()})
    return own


def _directly(
    function: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any], direct: _Direct
) -> Any:
    shown = direct.call.function if direct.call is not None else _shown(function)
    _warn(direct, shown)
    with disabled():
        obj = function(*args, **kwargs)
    _remember(obj, Origin(shown, False, f"{direct.kind}: {direct.reason}", direct.call, None, {}))
    return obj


# ---- the daemon and the loader ------------------------------------------------------------------


def _connected() -> "_client.Client":
    global _unavailable_until
    if _unavailable_until and time.monotonic() < _unavailable_until:
        raise _Direct("no daemon", "no daemon answered a moment ago")
    try:
        client = _client.default_client()
    except ImportError as failure:
        raise _Direct("no library", str(failure)) from None
    except _errors.Error:
        _unavailable_until = time.monotonic() + _RETRY_SECONDS
        raise
    _unavailable_until = 0.0
    return client


def _loader_command() -> List[str]:
    if not sys.executable:
        raise _Direct("no interpreter", "Python does not know where its program is (sys.executable)")
    import subprocess

    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    code = f"import sys; sys.path = [{package!r}, *filter(None, sys.path)]; {_START}"
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", code]


def _loader_environment() -> Dict[str, str]:
    """What the interpreter starts with; the rest, secrets among it, comes with the call."""
    return {name: value for name, value in os.environ.items() if not _key.is_secret(name)}


def _progress() -> Any:
    if os.environ.get("MODELCACHE_PROGRESS") is not None:
        return None  # as the variable says
    try:
        return True if sys.stderr.isatty() else None
    except (AttributeError, ValueError):
        return None


def _miss(client: "_client.Client", described: Call) -> str:
    """Why there is no entry: the parts in which the nearest one of the same function differs."""
    nearest: Optional[List[str]] = None
    with contextlib.suppress(_errors.Error, KeyError):
        same = [m for m in client.list() if m.get("name") == described.function]
        for model in same[-_COMPARED:]:
            with client.resident(model["id"]) as found:
                parts = found.metadata["python"]["parts"]
            different = _key.difference(parts, described.parts)
            if different and (nearest is None or len(different) < len(nearest)):
                nearest = different
    return "; ".join(nearest) if nearest else "nothing like it is resident"


def _reason_of(failure: _errors.Error, described: Call) -> BaseException:
    """The exception of the call itself, or why it is made directly."""
    if isinstance(failure, _errors.LoaderFailedError):
        raised = _raised_by_call(failure)
        if raised is not None:
            return raised
        return _Direct("loader", str(failure), described.function, call=described)
    if isinstance(failure, _errors.UnsupportedError):
        return _Direct("uncacheable", str(failure), described.function, call=described)
    kinds = {"unavailable": "no daemon", "no_room": "no room", "permission": "permission"}
    kind = kinds.get(failure.status, failure.status or "failure")
    return _Direct(kind, str(failure), call=described)


def _raised_by_call(failure: _errors.Error) -> Optional[BaseException]:
    from modelcache import _payload

    detail = getattr(failure, "detail", b"")
    return _payload.decode_failure(detail) if detail else None


# ---- warnings -----------------------------------------------------------------------------------


def _warn(direct: _Direct, shown: str) -> None:
    text = f"modelcache: {shown} is uncached, {direct.kind}: {direct.reason}"
    if is_set("MODELCACHE_STRICT"):
        raise UncachedError(text) from direct.__cause__
    if direct.which in _warned:
        return
    _warned.add(direct.which)
    warnings.warn(text, UncachedWarning, stacklevel=_stack_level())


def _stack_level() -> int:
    """Of the first frame that is not ours."""
    frame, level = sys._getframe(1), 1
    own = os.path.dirname(os.path.abspath(__file__))
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == own:
        frame, level = frame.f_back, level + 1
    return level


def _shown(function: Callable[..., Any]) -> str:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type):
        return f"{owner.__module__}:{owner.__qualname__}.{function.__name__}"
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}:{kind.__qualname__}"


# ---- objects that came out of the cache ---------------------------------------------------------


def _anchor(obj: Any) -> Any:
    """What a weak reference can be made to: the object, or the first such thing in it."""
    if type(obj) in (tuple, list, dict) and obj:
        return _anchor(next(iter(obj.values())) if isinstance(obj, dict) else obj[0])
    return obj


def _remember(obj: Any, origin: Origin) -> None:
    anchor = _anchor(obj)
    number = id(anchor)

    def forget(_: Any) -> None:
        _origins.pop(number, None)

    with contextlib.suppress(TypeError):  # no weak references to numbers, texts and the like
        _origins[number] = (weakref.ref(anchor, forget), anchor is obj, origin)


def _lookup(value: Any, where: str) -> Optional[Reference]:
    """The reference that stands for an argument; None for what did not come from the cache."""
    found = _origins.get(id(value))
    if found is None or found[0]() is not value or not found[1]:
        return None
    origin = found[2]
    if origin.entry is None or origin.call is None:
        return None
    edited = _edit(value, origin)
    if edited:
        raise Unkeyable(where, f"it was changed after it was loaded ({edited})", "edited")
    return Reference(value, origin.call.key, origin.entry.model_id)


def _edit(value: Any, origin: Origin) -> str:
    """How an object differs from what the cache has for it; empty when it does not."""
    from modelcache import _serialise

    assert origin.entry is not None
    if origin.entry.dirty():
        return "its memory was written to"
    try:
        again = _serialise.load_entry(origin.entry, origin.references)
        if _serialise.fingerprint(again) != _serialise.fingerprint(value):
            return "its structure, an attribute or a tensor is another"
    except Exception as failure:  # noqa: BLE001 - such an object does not travel
        return f"it does not travel any more: {failure}"
    return ""
