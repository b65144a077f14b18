"""Load once, map everywhere: tensors of a model over memory shared by all processes of a node.

    import modelcache
    model = modelcache.open("model.safetensors")
    model["w"]            # a torch.Tensor; its memory is shared until this process writes to it
    model.state_dict()    # all of them

Nothing heavy is imported: torch comes with the first tensor.
"""

from __future__ import annotations

import contextlib as _contextlib
import sys as _sys
import time as _time
from typing import Any, Dict, List, Optional, Sequence, Union

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
from modelcache._structure import Opaque

__version__ = "0.1.0"

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


def status() -> Dict[str, Any]:
    """Counters of the daemon; docs/protocol.md names them."""
    return default_client().status()


def list() -> "List[Dict[str, Any]]":
    """The models the daemon has."""
    return default_client().list()


def why(model: Union[Model, PathLike]) -> Dict[str, Any]:
    """State and history of a model, every hit, miss and eviction with its reason."""
    return default_client().why(model)


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
    "UnsupportedError",
    "evict",
    "list",
    "open",
    "pin",
    "status",
    "unpin",
    "verify",
    "why",
]
