"""The loader's side of a Python call: takes the job from the daemon, hands over what came out."""

from __future__ import annotations

import base64
import ctypes
import json
import os
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

from modelcache import _ffi
from modelcache._errors import CLASSES, Error

MAX_DETAIL_BYTES = 256 << 10
_READ_BYTES = 1 << 30  # the kernel gives at most 2 GiB at a time


class _Storage(Structure):
    _fields_ = [("data", c_void_p), ("nbytes", c_uint64)]


class _Tensor(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("name_bytes", c_uint64),
        ("dtype", c_char_p),
        ("shape", POINTER(c_int64)),
        ("stride", POINTER(c_int64)),
        ("ndim", c_uint32),
        ("storage", c_uint32),
        ("offset_bytes", c_uint64),
        ("flags", c_uint32),
        ("reserved", c_uint32),
    ]


class _Result(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("storages", POINTER(_Storage)),
        ("storage_count", c_uint64),
        ("tensors", POINTER(_Tensor)),
        ("tensor_count", c_uint64),
        ("metadata", c_char_p),
        ("metadata_bytes", c_uint64),
    ]


_SIGNATURES = {
    "mc_job_receive": (c_int32, [c_int32, POINTER(c_void_p)]),
    "mc_job_payload": (c_int32, [c_void_p]),
    "mc_job_progress": (c_int32, [c_void_p, c_uint64, c_uint64]),
    "mc_job_commit": (c_int32, [c_void_p, POINTER(_Result)]),
    "mc_job_fail": (c_int32, [c_void_p, c_char_p, c_char_p, c_char_p]),
    "mc_job_close": (None, [c_void_p]),
    "mc_job_last_error": (c_char_p, []),
    "mc_job_last_errno": (c_int32, []),
}


_library: Optional[ctypes.CDLL] = None


def library() -> ctypes.CDLL:
    """The loader's library. Raises ImportError with every place that was tried."""
    global _library
    if _library is None:
        _library = _ffi.load_library(
            "MODELCACHE_LOADER_LIBRARY", ("libmodelcache_loader.so",), _SIGNATURES
        )
    return _library


class Tensor(NamedTuple):
    """A named view of a storage, for lists and tables; strides in elements."""

    name: str
    dtype: str  # "float32"
    shape: Tuple[int, ...]
    stride: Tuple[int, ...]
    storage: Optional[int]  # None without data
    offset_bytes: int = 0
    flags: int = 0  # _ffi.MC_TENSOR_*


def _check(status: int) -> None:
    if status != 0:
        lib = library()
        name = _ffi.status_name(status)
        message = lib.mc_job_last_error().decode("utf-8", "replace") or name
        raise CLASSES.get(name, Error)(message, status, name, lib.mc_job_last_errno())


class Job:
    """A call that the daemon wants made. Ends with one commit or one failure."""

    def __init__(self, pointer: c_void_p) -> None:
        self._pointer: Optional[c_void_p] = pointer
        self._close = library().mc_job_close  # kept: globals may be gone at exit

    @classmethod
    def receive(cls, descriptor: int = 3) -> "Job":
        """The job that waits at `descriptor`, which belongs to it from now on."""
        pointer = c_void_p()
        _check(library().mc_job_receive(descriptor, byref(pointer)))
        return cls(pointer)

    def payload(self) -> bytes:
        """What the client gave to `make`."""
        descriptor = library().mc_job_payload(self._handle())
        parts = []
        at, end = 0, os.fstat(descriptor).st_size
        while at < end:
            parts.append(os.pread(descriptor, min(_READ_BYTES, end - at), at))
            at += len(parts[-1])
        return b"".join(parts)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Tells those who wait how far it is, at most ten times a second; `total` 0 is unknown."""
        _check(library().mc_job_progress(self._handle(), done_bytes, total_bytes))

    def commit(
        self,
        storages: Sequence[Tuple[int, int]],
        tensors: Sequence[Tensor],
        metadata: Dict[str, Any],
    ) -> None:
        """Hands the result over: storages as (address, bytes), which must not change meanwhile.

        Tensors of types that only the installed torch knows are left out of the table. What is
        wrong with one raises before anything is asked for; then commit may be tried again without
        it. Without room the daemon ends this process.
        """
        known = set(_ffi.dtype_names().values())
        listed = [tensor for tensor in tensors if tensor.dtype in known]
        text = json.dumps(metadata).encode()
        result = _Result(
            struct_size=sizeof(_Result),
            storages=(_Storage * len(storages))(*storages),
            storage_count=len(storages),
            tensors=(_Tensor * len(listed))(*map(_row, listed)),
            tensor_count=len(listed),
            metadata=text,
            metadata_bytes=len(text),
        )
        _check(library().mc_job_commit(self._handle(), byref(result)))

    def fail(self, code: str, message: str, detail: bytes = b"") -> None:
        """Fails the job for everybody who waits.

        `code` is the name of a status; after "unsupported" the daemon remembers that this call
        cannot be cached. `message` is logged; `detail` reaches the callers alone, and is left out
        when it has more than MAX_DETAIL_BYTES.
        """
        text = base64.b64encode(detail) if len(detail) <= MAX_DETAIL_BYTES else b""
        _check(
            library().mc_job_fail(
                self._handle(), code.encode(), message.encode("utf-8", "replace"), text
            )
        )

    def close(self) -> None:
        """Hangs up: without a commit or a failure the load has failed."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self._close(pointer)

    def __del__(self) -> None:
        if getattr(self, "_pointer", None) is not None:
            self.close()

    def _handle(self) -> c_void_p:
        if self._pointer is None:
            raise _ffi.error("invalid_argument", "this job is closed")
        return self._pointer


def _row(tensor: Tensor) -> _Tensor:
    name = tensor.name.encode("utf-8", "replace")
    ndim = len(tensor.shape)
    numbers = c_int64 * ndim
    return _Tensor(
        name=name,
        name_bytes=len(name),
        dtype=tensor.dtype.encode(),
        shape=numbers(*tensor.shape),
        stride=numbers(*tensor.stride),
        ndim=ndim,
        storage=_ffi.MC_NO_STORAGE if tensor.storage is None else tensor.storage,
        offset_bytes=tensor.offset_bytes,
        flags=tensor.flags,
    )
