"""Load once, map everywhere: tensors of a model over memory shared by all processes of a node.

    import modelcache
    model = modelcache.open("model.safetensors")
    model["w"]            # a torch.Tensor; its memory is shared until this process writes to it
    model.state_dict()    # all of them

Nothing heavy is imported: torch comes with the first tensor.
"""

from __future__ import annotations

import contextlib as _contextlib
import os as _os
import sys as _sys
import time as _time
from typing import Any, Callable, Dict, List, Optional, Sequence, TypeVar, Union

from modelcache import _ffi
from modelcache._client import Client, PathLike, default_client
from modelcache._errors import (
    BadFileError,
    CancelledError,
    DeadlineError,
    Error,
    FileChangedError,
    InUseError,
    InvalidArgumentError,
    LoaderFailedError,
    NoRoomError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
)
from modelcache._model import Model, TensorInfo
from modelcache._progress import Progress
from modelcache._patch import patch, patch_all, unpatch_all
from modelcache._structure import Opaque
from modelcache._uncached import UncachedError, UncachedWarning, disabled

__version__ = "0.1.0"

_Result = TypeVar("_Result")

with _contextlib.suppress(ImportError):  # whoever needs it says what is missing
    _ffi.library()

if "torch" in _sys.modules:  # else the first tensor brings both
    import modelcache._tensors  # noqa: F401


def open(
    path_or_paths: Union[PathLike, Sequence[PathLike]],
    *,
    name: Optional[str] = None,
    format: str = "auto",
    device: str = "cpu",
    timeout: Optional[float] = None,
    progress: Progress = None,
    pin: bool = False,
) -> Model:
    """The model in a file, a folder, an index of shards, or several files: see Client.open."""
    before = _time.monotonic()
    client = default_client(None if timeout is None else min(timeout, 10.0))
    if timeout is not None:
        timeout -= _time.monotonic() - before
    return client.open(
        path_or_paths,
        name=name,
        format=format,
        device=device,
        timeout=timeout,
        progress=progress,
        pin=pin,
    )


def load(function: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> _Result:
    """What `function(*args, **kwargs)` gives, over memory that every process shares.

    The first call is made by a loader process; later ones, in any process, find its result while the
    arguments, the files it read, the versions and the environment are the same. Each call gives an object
    of its own, and what is written to it is seen by that object alone. An object out of the cache among
    the arguments is passed by name, and is the same object in the result. What cannot be cached is called
    directly, with one UncachedWarning for each kind of reason: docs/python.md has the list.

    Raises what the function raises, and UncachedError with MODELCACHE_STRICT=1. Any thread.
    """
    from modelcache import _cached

    return _cached.call(_cached.original(function), args, kwargs)


def status() -> Dict[str, Any]:
    """Counters of the daemon; docs/protocol.md names them."""
    return default_client().status()


def list() -> "List[Dict[str, Any]]":
    """The models the daemon has."""
    return default_client().list()


def why(model: Any) -> Dict[str, Any]:
    """Why a model is, or is not, resident.

    Of a name, an id, a path or a Model: the daemon's history, every hit, miss and eviction with its
    reason. Of an object that a call through the cache gave: "state" (hit, miss, uncached, unknown) and
    "reason", which says what part of the key or which file differs, or which part of the object cannot be
    cached.
    """
    if isinstance(model, (str, bytes, _os.PathLike, Model)):
        return default_client().why(model)
    from modelcache import _cached

    return _cached.why(model)


def evict(model: Union[Model, PathLike]) -> None:
    """Drops a model. Raises InUseError while a process uses it or it is pinned."""
    default_client().evict(model)


def pin(model: Union[Model, PathLike]) -> None:
    """Keeps a model resident until it is unpinned."""
    default_client().pin(model)


def unpin(model: Union[Model, PathLike]) -> None:
    """Lets a pinned model be evicted again."""
    default_client().unpin(model)


def verify(model: Union[Model, PathLike]) -> Dict[str, Any]:
    """Hashes a model's memory again and compares it with its files."""
    return default_client().verify(model)


__all__ = [
    "BadFileError",
    "CancelledError",
    "Client",
    "DeadlineError",
    "Error",
    "FileChangedError",
    "InUseError",
    "InvalidArgumentError",
    "LoaderFailedError",
    "Model",
    "NoRoomError",
    "NotFoundError",
    "Opaque",
    "PermissionDeniedError",
    "TensorInfo",
    "UnavailableError",
    "UncachedError",
    "UncachedWarning",
    "UnsupportedError",
    "disabled",
    "evict",
    "list",
    "load",
    "open",
    "patch",
    "patch_all",
    "pin",
    "status",
    "unpatch_all",
    "unpin",
    "verify",
    "why",
]
