"""Model: the tensors of one model as a mapping, over memory shared with every other process."""

from __future__ import annotations

import collections
import ctypes
import functools
import json
import struct
from collections.abc import Mapping
from ctypes import byref, c_uint64, c_void_p, sizeof
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from modelcache import _ffi, _structure

if TYPE_CHECKING:
    import torch

    from modelcache._tensors import TensorBuilder


_RECORD = struct.Struct(_ffi.TENSOR_RECORD)


class TensorInfo(NamedTuple):
    """One row of a model's tensor table; strides in elements, the rest in bytes."""

    name: str
    dtype: str
    shape: Tuple[int, ...]
    stride: Tuple[int, ...]
    offset: int  # of the first element in its storage
    nbytes: int  # from the first element to the end of the last one
    storage: Optional[int]  # None for a tensor without data
    storage_bytes: int
    requires_grad: bool


class Memory:
    """Owns one reference to the library's model; the map lives as long as this object."""

    __slots__ = ("pointer", "_close")

    def __init__(self, pointer: c_void_p) -> None:
        self.pointer = pointer
        self._close = _ffi.library().mc_model_close  # kept: globals may be gone at exit

    def __del__(self) -> None:
        self._close(self.pointer)


class Tables:
    """The model's tables, each made of plain numbers and names when it is first needed."""

    def __init__(self, memory: Memory) -> None:
        tables = _ffi.Tables(struct_size=sizeof(_ffi.Tables))
        _ffi.check(_ffi.library().mc_model_tables(memory.pointer, byref(tables)))
        self.memory = memory
        self.count: int = tables.tensor_count
        self._tables = tables
        self._whole: Optional[ctypes.Array] = None

    @functools.cached_property
    def names(self) -> List[str]:
        # Columns, not rows: a thousand short-lived tuples would set off the garbage collector.
        raw = memoryview(ctypes.string_at(self._tables.tensors, self.count * _RECORD.size))
        offsets = raw.cast("Q")[:: _RECORD.size // 8].tolist()
        sizes = raw.cast("I")[2 :: _RECORD.size // 4].tolist()
        text = ctypes.string_at(self._tables.base, self._tables.base_bytes)
        return [text[start : start + size].decode() for start, size in zip(offsets, sizes)]

    @functools.cached_property
    def rows(self) -> List[Tuple[int, ...]]:
        """The tensors as _ffi.TENSOR_RECORD has them."""
        raw = ctypes.string_at(self._tables.tensors, self.count * _RECORD.size)
        return list(_RECORD.iter_unpack(raw))

    @functools.cached_property
    def dimensions(self) -> Tuple[int, ...]:
        return _numbers(self._tables.dimensions, self._tables.dimension_count, "q")

    @functools.cached_property
    def addresses(self) -> Tuple[int, ...]:
        """Of the storages, in this process."""
        return _numbers(self._tables.storage_data, self._tables.storage_count, "Q")

    @functools.cached_property
    def storage_bytes(self) -> List[int]:
        record = struct.Struct(_ffi.STORAGE_RECORD)
        raw = ctypes.string_at(self._tables.storages, self._tables.storage_count * record.size)
        return [row[3] for row in record.iter_unpack(raw)]

    @functools.cached_property
    def low(self) -> int:
        return min(self.addresses, default=0)

    def whole(self) -> ctypes.Array:
        """A writable buffer that starts at `low` and spans every storage.

        Whoever holds it, or memory exported from it, keeps the model mapped. Between the storages
        nothing need be mapped: take only ranges of storages from it.
        """
        if self._whole is None:
            ends = [a + n for a, n in zip(self.addresses, self.storage_bytes)]
            span = (ctypes.c_char * max(1, max(ends, default=0) - self.low)).from_address(self.low)
            span._memory = self.memory  # type: ignore[attr-defined]
            self._whole = span
        return self._whole

    def view(self, number: int) -> memoryview:
        """The bytes of a storage, writable in this process alone."""
        start = self.addresses[number] - self.low
        return memoryview(self.whole()).cast("B")[start : start + self.storage_bytes[number]]

    def shape_and_stride(self, row: Tuple[int, ...]) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
        first, count = row[5], row[6]
        numbers = self.dimensions[first : first + 2 * count]
        return numbers[:count], numbers[count:]


def _numbers(address: Optional[int], count: int, kind: str) -> Tuple[int, ...]:
    if not count:
        return ()
    return struct.unpack(f"<{count}{kind}", ctypes.string_at(address or 0, 8 * count))


class Model(Mapping):
    """A mapping from tensor names, in the order of the file, to torch tensors.

    A tensor is built when it is first asked for and stays the same object afterwards. Its memory is
    shared with every process that opened the model until it is written to: writes are seen in this
    process alone. Tensors stay valid after the Model is gone. torch is imported by the first
    tensor, not before. Any thread.
    """

    def __init__(self, pointer: c_void_p) -> None:
        memory = Memory(pointer)
        info = _ffi.ModelInfo(struct_size=sizeof(_ffi.ModelInfo))
        _ffi.check(_ffi.library().mc_model_info(pointer, byref(info)))
        self.hit: bool = bool(info.hit)
        self.reason: str = info.reason.decode("utf-8", "replace")
        self.name: str = info.name.decode("utf-8", "replace")
        self.model_id: str = info.model_id.decode()
        self.format: str = info.format.decode()
        self.load_seconds: float = info.load_seconds
        self.nbytes: int = info.payload_bytes
        self._memory: Optional[Memory] = memory
        self._count: int = info.tensor_count
        self._table: Optional[Tables] = None
        self._index: Optional[Dict[str, int]] = None
        self._described: Optional[Dict[str, Any]] = None

    # ---- the mapping ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables().names)

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __getitem__(self, name: str) -> "torch.Tensor":
        number = self._names().get(name)
        if number is None:
            raise KeyError(name)
        return self._builder().tensor(number)

    def items(self):  # type: ignore[override]
        return self._all().items()

    def values(self):  # type: ignore[override]
        return self._all().values()

    def __repr__(self) -> str:
        return f"<modelcache.Model {self.name!r}: {self._count} tensors, {self.nbytes} bytes>"

    # ---- whole objects --------------------------------------------------------------------------

    def state_dict(self) -> "collections.OrderedDict[str, torch.Tensor]":
        """Every tensor by name, with the versions (`_metadata`) that a saved state dict carries."""
        result = collections.OrderedDict(self._all())
        if self.format == "torch":
            metadata = _structure.version_metadata(self._description().get("structure"))
            if metadata is not None:
                result._metadata = metadata  # type: ignore[attr-defined]
        return result

    def object(self) -> Any:
        """What was saved, in its own nested form; what cannot be represented is an Opaque.

        A format that only knows names and tensors gives a dict.
        """
        description = self._description()
        if "structure" not in description:
            return dict(self._all())
        return _structure.rebuild(description["structure"], self._builder().tensor)

    def jit(self) -> Any:
        """A torch.jit.ScriptModule whose parameters, buffers and constants are not copied."""
        from modelcache import _torchscript

        description = self._description().get("torchscript")
        if description is None:
            raise _ffi.error("unsupported", f"{self.name}: {self.format} holds no TorchScript")
        return _torchscript.load(description, self._builder())

    # ---- without torch --------------------------------------------------------------------------

    @property
    def metadata(self) -> Dict[str, str]:
        """The text pairs that the file carries (`__metadata__` of safetensors)."""
        return dict(self._description().get("metadata", {}))

    @property
    def index_metadata(self) -> Dict[str, Any]:
        """`metadata` of the index that named the shards."""
        return dict(self._description().get("index_metadata", {}))

    @property
    def opaque(self) -> List[str]:
        """Paths and classes of the saved leaves that are not representable."""
        return list(self._description().get("opaque", []))

    @property
    def extra_files(self) -> Dict[str, bytes]:
        """The extra files of a TorchScript archive."""
        import base64

        files = self._description().get("torchscript", {}).get("extra_files", {})
        return {name: base64.b64decode(text) for name, text in files.items()}

    def tensors(self) -> List[TensorInfo]:
        """The tensor table."""
        tables = self._tables()
        dtypes = _ffi.dtype_names()
        result = []
        for name, row in zip(tables.names, tables.rows):
            shape, stride = tables.shape_and_stride(row)
            storage = None if row[2] == _ffi.MC_NO_STORAGE else row[2]
            whole = 0 if storage is None else tables.storage_bytes[storage]
            grad = bool(row[8] & _ffi.MC_TENSOR_REQUIRES_GRAD)
            result.append(
                TensorInfo(
                    name, dtypes[row[7]], shape, stride, row[3], row[4], storage, whole, grad
                )
            )
        return result

    def raw(self, name: str) -> memoryview:
        """The bytes a tensor can reach, writable (in this process alone), without torch."""
        number = self._names().get(name)
        if number is None:
            raise KeyError(name)
        tables = self._tables()
        row = tables.rows[number]
        if row[2] == _ffi.MC_NO_STORAGE or row[4] == 0:
            return memoryview(bytearray())
        start = tables.addresses[row[2]] + row[3] - tables.low
        return memoryview(tables.whole()).cast("B")[start : start + row[4]]

    def close(self) -> None:
        """Gives up this object's part. The memory goes with the last tensor made from it."""
        self._memory = None
        self._table = None
        self.__dict__.pop("_built", None)

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- parts, made when first needed ----------------------------------------------------------

    def _live(self) -> Memory:
        memory = self._memory
        if memory is None:
            raise _ffi.error("invalid_argument", f"the model {self.name!r} is closed")
        return memory

    def _tables(self) -> Tables:
        tables = self._table
        if tables is None:
            tables = self._table = Tables(self._live())
        return tables

    def _names(self) -> Dict[str, int]:
        if self._index is None:
            self._index = {name: number for number, name in enumerate(self._tables().names)}
        return self._index

    def _metadata_text(self) -> bytes:
        text = c_void_p()
        size = c_uint64()
        pointer = self._live().pointer
        _ffi.check(_ffi.library().mc_model_metadata(pointer, byref(text), byref(size)))
        return ctypes.string_at(text.value or 0, size.value) if size.value else b"{}"

    def _description(self) -> Dict[str, Any]:
        if self._described is None:
            self._described = json.loads(self._metadata_text())
        return self._described

    def _builder(self) -> "TensorBuilder":
        builder = self.__dict__.get("_built")
        if builder is None:
            from modelcache._tensors import TensorBuilder

            builder = TensorBuilder(self._tables(), self._metadata_text(), self.name, self.format)
            # setdefault: two threads that build at once must end with one set of tensors, and a
            # lock could be held by a thread that does not exist in a forked child.
            builder = self.__dict__.setdefault("_built", builder)
        return builder

    def _all(self) -> Dict[str, "torch.Tensor"]:
        return dict(zip(self._tables().names, self._builder().all()))
