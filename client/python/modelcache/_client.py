"""Client: a connection to the daemon, as an object and as one default per socket."""

from __future__ import annotations

import json
import os
from ctypes import byref, c_char_p, c_void_p, sizeof
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

from modelcache import _ffi
from modelcache._model import Model
from modelcache._progress import PROGRESS, Progress, ProgressWatch

PathLike = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]


def milliseconds(seconds: Optional[float]) -> int:
    # The library reads 0 as "the default", so the shortest wait is one millisecond.
    return 0 if seconds is None else max(1, int(seconds * 1000))


def _encoded(text: Optional[str]) -> Optional[bytes]:
    return None if text is None else os.fsencode(text)


def _reference(model: Union[Model, PathLike]) -> str:
    """What the library calls a model: an id, a name or a path."""
    if isinstance(model, Model):
        return model.model_id
    text = os.fsdecode(model)
    # An object of a path's type is a path, whatever models are called: the library knows it by "./".
    return text if isinstance(model, (str, bytes)) else os.path.join(os.curdir, text)


def _path_list(path_or_paths: Union[PathLike, Sequence[PathLike]]) -> List[bytes]:
    if isinstance(path_or_paths, (str, bytes, os.PathLike)):
        return [os.fsencode(path_or_paths)]
    return [os.fsencode(path) for path in path_or_paths]


def open_watched(watch: ProgressWatch, call: Callable[[Any], int]) -> c_void_p:
    """The model that `call` puts where its argument points; raises its failure, or what a progress
    function or Ctrl-C raised meanwhile."""
    pointer = c_void_p()

    def attempt() -> Optional[BaseException]:
        status = call(byref(pointer))
        return None if status == 0 else _ffi.failure(status)

    failure = watch.run(attempt)
    if failure is None:
        return pointer
    if pointer.value is not None:  # loaded, and given up all the same
        _ffi.library().mc_model_close(pointer)
    try:
        raise failure
    finally:
        # An exception that its own frame refers to would keep the caller's models until the
        # garbage collector runs.
        del failure


class Client:
    """A connection to the daemon. Any thread; a forked child gets a connection of its own.

    `socket`: path of the daemon's socket, by default as the daemon computes it.
    `autostart`: start a daemon when none answers; by default unless MODELCACHE_AUTOSTART=0.
    `timeout`: seconds for connecting, starting included.
    """

    def __init__(
        self,
        socket: Optional[PathLike] = None,
        *,
        autostart: Optional[bool] = None,
        timeout: Optional[float] = None,
    ) -> None:
        self._pointer: Optional[int] = None
        self._lib = _ffi.library()
        options = _ffi.ClientOptions(struct_size=sizeof(_ffi.ClientOptions))
        if autostart is not None:
            options.autostart = _ffi.MC_AUTOSTART_ALWAYS if autostart else _ffi.MC_AUTOSTART_NEVER
        options.socket_path = None if socket is None else os.fsencode(socket)
        options.timeout_ms = milliseconds(timeout)
        pointer = c_void_p()
        _ffi.check(self._lib.mc_client_connect(byref(options), byref(pointer)))
        self._pointer = pointer.value

    def close(self) -> None:
        """Gives up the connection; models opened through it stay valid."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self._lib.mc_client_close(pointer)

    def __del__(self) -> None:
        if getattr(self, "_pointer", None) is not None:
            self.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _handle(self) -> int:
        if self._pointer is None:
            raise _ffi.error("invalid_argument", "this modelcache.Client is closed")
        return self._pointer

    def _info(self) -> _ffi.ClientInfo:
        info = _ffi.ClientInfo(struct_size=sizeof(_ffi.ClientInfo))
        _ffi.check(self._lib.mc_client_get_info(self._handle(), byref(info)))
        return info

    @property
    def socket_path(self) -> str:
        return os.fsdecode(self._info().socket_path)

    @property
    def daemon_pid(self) -> int:
        """The daemon's pid in the daemon's own PID namespace."""
        return int(self._info().daemon_pid)

    def open(
        self,
        path_or_paths: Union[PathLike, Sequence[PathLike]],
        *,
        name: Optional[str] = None,
        format: str = "auto",
        device: str = "cpu",
        timeout: Optional[float] = None,
        progress: Progress = None,
        pin: bool = False,
    ) -> Model:
        """The model in a file, a folder, an index of shards, or several files.

        `timeout`: seconds to wait for a cold load, by default MODELCACHE_LOAD_TIMEOUT, else no
        limit; the call returns within it, whatever the daemon does. `progress`: True for a line on
        standard error, or a function of (done, total) bytes; what it raises gives up the load. A
        model that is resident keeps its name, whatever `name` says; `reason` tells. Raises
        subclasses of Error.
        """
        paths = _path_list(path_or_paths)
        watch = ProgressWatch(progress)
        options = _ffi.OpenOptions(
            struct_size=sizeof(_ffi.OpenOptions),
            flags=_ffi.MC_OPEN_PIN if pin else 0,
            name=_encoded(name),
            format=_encoded(format),
            device=_encoded(device),
            timeout_ms=milliseconds(timeout),
            progress=PROGRESS,
            progress_user=watch.user,
        )
        array = (c_char_p * max(1, len(paths)))(*paths)
        client = self._handle()
        return Model(
            open_watched(
                watch,
                lambda out: self._lib.mc_model_open(client, array, len(paths), byref(options), out),
            )
        )

    def resident(self, model: Union[Model, PathLike]) -> Model:
        """A model that is resident already, by name, id (six digits or more) or path."""
        pointer = c_void_p()
        name = os.fsencode(_reference(model))
        _ffi.check(self._lib.mc_model_open_resident(self._handle(), name, byref(pointer)))
        return Model(pointer)

    def call(self, method: str, **arguments: Any) -> Dict[str, Any]:
        """A control request and its answer, both as docs/protocol.md names their members."""
        reply = c_void_p()
        _ffi.check(
            self._lib.mc_call(
                self._handle(), method.encode(), json.dumps(arguments).encode(), byref(reply)
            )
        )
        return json.loads(_ffi.take_text(reply))

    def status(self) -> Dict[str, Any]:
        return self.call("status")

    def list(self) -> List[Dict[str, Any]]:
        return self.call("list")["models"]

    def why(self, model: Union[Model, PathLike]) -> Dict[str, Any]:
        """State and history of a model, every hit, miss and eviction with its reason."""
        return self.call("why", model=_reference(model))

    def evict(self, model: Union[Model, PathLike]) -> None:
        self.call("evict", model=_reference(model))

    def pin(self, model: Union[Model, PathLike]) -> None:
        self.call("pin", model=_reference(model))

    def unpin(self, model: Union[Model, PathLike]) -> None:
        self.call("unpin", model=_reference(model))

    def verify(self, model: Union[Model, PathLike]) -> Dict[str, Any]:
        """Hashes the model's memory again and compares it with its files."""
        return self.call("verify", model=_reference(model))

    def metrics(self) -> str:
        """Counters in Prometheus' text format."""
        return self.call("metrics")["text"]

    def shutdown(self) -> None:
        self.call("shutdown")


_defaults: Dict[str, Client] = {}


def default_client(timeout: Optional[float] = None) -> Client:
    """The process's own client for the socket that the environment names now.

    `timeout`: seconds for connecting, when it must be made.
    """
    path = _ffi.default_socket_path()
    client = _defaults.get(path)
    if client is None:
        # Not Client(path): at a socket that nobody named the library is more careful. No lock, which
        # a fork could leave taken: of two threads that connect at once, one connection stays.
        client = _defaults.setdefault(path, Client(timeout=timeout))
    return client
