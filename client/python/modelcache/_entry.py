"""Entries of Python calls: found in the daemon, or made by a loader that it starts.

Whoever unpickles an entry runs what the loader wrote: the library refuses a daemon of another user.
"""

from __future__ import annotations

import ctypes
import json
from ctypes import byref, c_char_p, c_uint32, c_uint64, c_void_p, sizeof
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Mapping, Optional, Sequence

from modelcache import _ffi
from modelcache._client import Client, milliseconds, open_watched
from modelcache._errors import NotFoundError
from modelcache._model import Memory, Tables
from modelcache._progress import PROGRESS, Progress, ProgressWatch

if TYPE_CHECKING:
    import torch


class Entry:
    """What a call gave, mapped into this process: storages by number, and metadata.

    The memory lives as long as the entry or anything made from it. Any thread.
    """

    def __init__(self, pointer: c_void_p) -> None:
        memory = Memory(pointer)
        info = _ffi.ModelInfo(struct_size=sizeof(_ffi.ModelInfo))
        _ffi.check(_ffi.library().mc_model_info(pointer, byref(info)))
        self.hit: bool = bool(info.hit)
        self.reason: str = info.reason.decode("utf-8", "replace")
        self.name: str = info.name.decode("utf-8", "replace")
        self.model_id: str = info.model_id.decode()
        self.load_seconds: float = info.load_seconds
        self.nbytes: int = info.payload_bytes
        self.storage_count: int = info.storage_count
        self._memory: Optional[Memory] = memory
        self._table: Optional[Tables] = None
        self._metadata: Optional[Dict[str, Any]] = None

    @property
    def metadata(self) -> Dict[str, Any]:
        """What the loader said of it beside the bytes."""
        if self._metadata is None:
            text, size = c_void_p(), c_uint64()
            pointer = self._live().pointer
            _ffi.check(_ffi.library().mc_model_metadata(pointer, byref(text), byref(size)))
            self._metadata = json.loads(ctypes.string_at(text.value or 0, size.value))
        return self._metadata

    def storage(self, number: int) -> "torch.UntypedStorage":
        """A storage over the shared memory. Writes to it are seen in this process alone, by whoever
        has a storage of this number of this entry, and by no other storage."""
        from modelcache._tensors import make_storage

        return make_storage(self._tables(), number)

    def raw(self, number: int) -> memoryview:
        """The bytes of a storage in place, read-only."""
        return self._tables().view(number).toreadonly()

    def dirty(self) -> bool:
        """True when this process, or one it was forked from, wrote to any storage of the entry.

        False also where the kernel does not tell.
        """
        written = c_uint32()
        status = _ffi.library().mc_model_is_written(self._live().pointer, byref(written))
        return status == 0 and bool(written.value)

    def close(self) -> None:
        """Gives up this object's part. The memory goes with the last storage made from it."""
        self._memory = None
        self._table = None

    def __enter__(self) -> "Entry":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<modelcache entry {self.name!r}: {self.storage_count} storages>"

    def _live(self) -> Memory:
        memory = self._memory
        if memory is None:
            raise _ffi.error("invalid_argument", f"the entry {self.name!r} is closed")
        return memory

    def _tables(self) -> Tables:
        tables = self._table
        if tables is None:
            tables = self._table = Tables(self._live())
        return tables


def find(client: Client, key: str) -> Optional[Entry]:
    """The resident entry of the call with this key, 32 hexadecimal digits; None when there is none.

    Raises UnsupportedError, with the reason, for a call that the daemon remembers as uncacheable.
    """
    pointer = c_void_p()
    status = _ffi.library().mc_entry_find(client._handle(), key.encode(), byref(pointer))
    if status == 0:
        return Entry(pointer)
    failure = _ffi.failure(status)
    if isinstance(failure, NotFoundError):
        return None
    raise failure


def make(
    client: Client,
    key: str,
    *,
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    payload: bytes,
    stale: Optional[str] = None,
    stale_reason: str = "",
    timeout: Optional[float] = None,
    progress: Progress = None,
    pin: bool = False,
) -> Entry:
    """The entry of a call: the resident one, that of a load in progress, or a new one.

    A new one is made by a process that the daemon starts: `arguments`, the first of which is the
    absolute path of a program, in `folder` with `environment`, of which variables that are not
    UTF-8 are left out and those that name the daemon are set. It gets `payload` through _fill.Job.
    `stale` is the id of an entry that must not be given again, `stale_reason` says what is out of
    date about it.

    Raises subclasses of Error; `detail` has the bytes that the loader sent with its failure.
    """
    watch = ProgressWatch(progress)
    options = _ffi.EntryOptions(
        struct_size=sizeof(_ffi.EntryOptions),
        flags=_ffi.MC_OPEN_PIN if pin else 0,
        key=key.encode(),
        name=name.encode("utf-8", "replace"),
        folder=_utf8(folder),
        payload=payload,
        payload_bytes=len(payload),
        stale=None if stale is None else stale.encode(),
        stale_reason=stale_reason.encode("utf-8", "replace"),
        timeout_ms=milliseconds(timeout),
        progress=PROGRESS,
        progress_user=watch.user,
    )
    programs = _texts(map(_utf8, arguments))
    variables = _texts(_variables(client, environment))
    options.arguments, options.argument_count = programs, len(programs)
    options.environment, options.environment_count = variables, len(variables)
    handle = client._handle()
    lib = _ffi.library()
    return Entry(open_watched(watch, lambda out: lib.mc_entry_make(handle, byref(options), out)))


def _texts(texts: Iterable[bytes]) -> "ctypes.Array[c_char_p]":
    listed = list(texts)
    return (c_char_p * len(listed))(*listed)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise _ffi.error("unsupported", f"{text!r} is not UTF-8: a loader cannot get it") from None


def _variables(client: Client, environment: Mapping[str, str]) -> List[bytes]:
    # The loader must find the client's daemon, whatever the variables say, and never start another.
    told = {"MODELCACHE_SOCKET": client.socket_path, "MODELCACHE_AUTOSTART": "0"}
    result = []
    for variable, value in {**environment, **told}.items():
        try:
            result.append(f"{variable}={value}".encode())
        except UnicodeEncodeError:
            continue
    return result
