"""The C library: found, loaded once, every function with its types, statuses as exceptions.

The contracts of the functions are in modelcache/modelcache.h.
"""

from __future__ import annotations

import base64
import ctypes
import os
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, Dict, List, Optional, Sequence

from modelcache._errors import CLASSES, Error

_NAMES = ("libmodelcache.so.0", "libmodelcache.so")


class ClientOptions(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("autostart", c_uint32),
        ("socket_path", c_char_p),
        ("daemon_path", c_char_p),
        ("timeout_ms", c_int64),
    ]


class ClientInfo(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("protocol_version", c_uint32),
        ("socket_path", c_char_p),
        ("daemon_version", c_char_p),
        ("daemon_pid", c_int64),
        ("started", c_uint32),
        ("reserved", c_uint32),
    ]


ProgressFunction = CFUNCTYPE(c_int32, c_void_p, c_uint64, c_uint64)


class OpenOptions(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("name", c_char_p),
        ("format", c_char_p),
        ("device", c_char_p),
        ("timeout_ms", c_int64),
        ("progress", ProgressFunction),
        ("progress_user", c_void_p),
    ]


class EntryOptions(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("key", c_char_p),
        ("name", c_char_p),
        ("arguments", POINTER(c_char_p)),
        ("argument_count", c_size_t),
        ("environment", POINTER(c_char_p)),
        ("environment_count", c_size_t),
        ("folder", c_char_p),
        ("payload", c_char_p),
        ("payload_bytes", c_uint64),
        ("stale", c_char_p),
        ("stale_reason", c_char_p),
        ("timeout_ms", c_int64),
        ("progress", ProgressFunction),
        ("progress_user", c_void_p),
    ]


class ModelInfo(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("hit", c_uint32),
        ("reason", c_char_p),
        ("name", c_char_p),
        ("model_id", c_char_p),
        ("format", c_char_p),
        ("lease", c_uint64),
        ("load_seconds", c_double),
        ("payload_bytes", c_uint64),
        ("arena_count", c_uint32),
        ("tensor_count", c_uint32),
        ("storage_count", c_uint32),
        ("reserved", c_uint32),
    ]


class Tables(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("tensor_count", c_uint32),
        ("storage_count", c_uint32),
        ("reserved", c_uint32),
        ("base", c_void_p),
        ("base_bytes", c_uint64),
        ("tensors", c_void_p),
        ("storages", c_void_p),
        ("storage_data", c_void_p),
        ("dimensions", c_void_p),
        ("dimension_count", c_uint64),
    ]


class Knapsack(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("method", c_uint32),
        ("count", c_uint64),
        ("weights", c_void_p),
        ("real_weights", c_void_p),
        ("values", c_void_p),
        ("pins", c_void_p),
        ("capacity", c_uint64),
        ("real_capacity", c_double),
        ("quantum", c_double),
        ("absolute_gap", c_double),
        ("relative_gap", c_double),
        ("memory_limit_bytes", c_uint64),
        ("work_limit", c_uint64),
        ("threads", c_uint32),
        ("reserved", c_uint32),
    ]


class KnapsackResult(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("end", c_uint32),
        ("value", c_double),
        ("bound", c_double),
        ("weight", c_uint64),
        ("capacity", c_uint64),
        ("units_per_one", c_double),
        ("work", c_uint64),
        ("peak_states", c_uint64),
    ]


MC_OPEN_PIN = 1
MC_NO_STORAGE = 0xFFFFFFFF
MC_AUTOSTART_NEVER = 1
MC_AUTOSTART_ALWAYS = 2
MC_TENSOR_REQUIRES_GRAD = 1
MC_TENSOR_CONJUGATE = 2
MC_TENSOR_NEGATIVE = 4
MC_TENSOR_PARAMETER = 8

# As modelcache.h gives the layout of mc_tensor_record and mc_storage_record.
TENSOR_RECORD = "<QIIQQIHHII"
STORAGE_RECORD = "<IIQQ16s16s"

_CLIENT = c_void_p
_MODEL = c_void_p
_SIGNATURES = {
    "mc_status_text": (c_char_p, [c_int32]),
    "mc_last_error": (c_char_p, []),
    "mc_last_errno": (c_int32, []),
    "mc_last_error_detail": (c_char_p, []),
    "mc_version": (c_char_p, []),
    "mc_free": (None, [c_void_p]),
    "mc_dtype_count": (c_uint32, []),
    "mc_dtype_name": (c_char_p, [c_uint32]),
    "mc_dtype_bits": (c_uint32, [c_uint32]),
    "mc_client_connect": (c_int32, [POINTER(ClientOptions), POINTER(_CLIENT)]),
    "mc_client_close": (None, [_CLIENT]),
    "mc_client_get_info": (c_int32, [_CLIENT, POINTER(ClientInfo)]),
    "mc_default_socket_path": (c_int32, [POINTER(c_void_p)]),
    "mc_call": (c_int32, [_CLIENT, c_char_p, c_char_p, POINTER(c_void_p)]),
    "mc_model_open": (
        c_int32,
        [_CLIENT, POINTER(c_char_p), c_size_t, POINTER(OpenOptions), POINTER(_MODEL)],
    ),
    "mc_model_open_resident": (c_int32, [_CLIENT, c_char_p, POINTER(_MODEL)]),
    "mc_entry_find": (c_int32, [_CLIENT, c_char_p, POINTER(_MODEL)]),
    "mc_entry_make": (c_int32, [_CLIENT, POINTER(EntryOptions), POINTER(_MODEL)]),
    "mc_model_is_written": (c_int32, [_MODEL, POINTER(c_uint32)]),
    "mc_model_close": (None, [_MODEL]),
    "mc_model_info": (c_int32, [_MODEL, POINTER(ModelInfo)]),
    "mc_model_metadata": (c_int32, [_MODEL, POINTER(c_void_p), POINTER(c_uint64)]),
    "mc_model_tables": (c_int32, [_MODEL, POINTER(Tables)]),
    "mc_model_dlpack": (c_int32, [_MODEL, c_uint64, POINTER(c_void_p)]),
    "mc_knapsack_solve": (c_int32, [POINTER(Knapsack), c_void_p, POINTER(KnapsackResult)]),
}


def _candidates(names: Sequence[str]) -> List[str]:
    """Where a library of ours may lie, best first. A bare name asks the dynamic linker."""
    here = os.path.dirname(os.path.abspath(__file__))
    folders = [here]
    parent = here
    for _ in range(4):  # <prefix>/lib/pythonX.Y/site-packages/modelcache is the deepest layout
        parent = os.path.dirname(parent)
        folders += [parent, os.path.join(parent, "lib")]
    chosen = os.environ.get("MODELCACHE_LIBRARY")
    if chosen:  # the others lie beside it
        folders.insert(0, os.path.dirname(os.path.abspath(chosen)))
    paths = [os.path.join(folder, name) for folder in folders for name in names]
    return [path for path in paths if os.path.exists(path)] + list(names)


def load_library(
    variable: str, names: Sequence[str], signatures: Dict[str, Any]
) -> ctypes.CDLL:
    """A library of ours with the types of its functions: the one that the environment's `variable`
    names, else the first of `names` that is found. Raises ImportError with all that was tried."""
    chosen = os.environ.get(variable)
    failures = []
    for candidate in [chosen] if chosen else _candidates(names):
        try:
            loaded = ctypes.CDLL(candidate)
        except OSError as failure:
            failures.append(str(failure))
            continue
        for name, (result, arguments) in signatures.items():
            function = getattr(loaded, name)
            function.restype = result
            function.argtypes = arguments
        return loaded
    raise ImportError(
        f"{names[-1]} was not found; set {variable} to its path (tried: {'; '.join(failures)})"
    )


_library: Optional[ctypes.CDLL] = None


def library() -> ctypes.CDLL:
    """The loaded library. Raises ImportError with every place that was tried."""
    global _library
    if _library is None:
        # No lock, which a fork could leave taken: two threads that load it get the same library.
        _library = load_library("MODELCACHE_LIBRARY", _NAMES, _SIGNATURES)
    return _library


def status_name(status: int) -> str:
    return library().mc_status_text(status).decode()


def failure(status: int) -> Error:
    """The exception for the last call of this thread, which answered `status`."""
    lib = library()
    name = lib.mc_status_text(status).decode()
    message = lib.mc_last_error().decode("utf-8", "replace") or name
    detail = lib.mc_last_error_detail()
    return CLASSES.get(name, Error)(
        message, status, name, lib.mc_last_errno(), _decoded(detail) if detail else b""
    )


def _decoded(detail: bytes) -> bytes:
    try:
        return base64.b64decode(detail, validate=True)
    except ValueError:  # not written by _fill
        return b""


def error(name: str, message: str) -> Error:
    """An exception of the status called `name`, found by asking the library for its number."""
    code = next((n for n in range(1, 256) if status_name(n) == name), 0)
    return CLASSES.get(name, Error)(message, code, name)


def check(status: int) -> None:
    if status != 0:
        raise failure(status)


def take_text(pointer: c_void_p) -> str:
    """The text a call handed over, which is freed."""
    try:
        return ctypes.string_at(pointer.value or 0).decode("utf-8", "replace")
    finally:
        library().mc_free(pointer)


def default_socket_path() -> str:
    text = c_void_p()
    check(library().mc_default_socket_path(byref(text)))
    return take_text(text)


_dtypes: Optional[Dict[int, str]] = None


def dtype_names() -> Dict[int, str]:
    """Number to PyTorch's name of every element type the library knows."""
    global _dtypes
    if _dtypes is None:
        lib = library()
        _dtypes = {n: lib.mc_dtype_name(n).decode() for n in range(1, lib.mc_dtype_count() + 1)}
    return _dtypes
