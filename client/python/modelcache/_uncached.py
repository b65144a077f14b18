"""What tells users that a call was made directly, and the switch that makes all calls direct."""

from __future__ import annotations

import contextlib
import contextvars
import os
from typing import Iterator

from modelcache._errors import Error

_off: "contextvars.ContextVar[bool]" = contextvars.ContextVar("modelcache_off", default=False)


class UncachedWarning(UserWarning):
    """A call was made directly, because the cache could not help with it."""


class UncachedError(Error):
    """What would be an UncachedWarning, with MODELCACHE_STRICT=1."""


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Calls inside are made directly: those of this thread, and of the tasks that it starts."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)


def is_off() -> bool:
    """Whether calls are to be made directly: inside `disabled`, or with MODELCACHE_DISABLE=1, which
    loaders have set."""
    return _off.get() or is_set("MODELCACHE_DISABLE")


def is_set(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")
