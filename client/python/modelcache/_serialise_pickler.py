"""The pickler: objects as cloudpickle takes them, tensors and storages by number.

Numbers from 0 are rows of the table of tensors; negative ones are extras, counted from the end of
one list: what the caller provides by name, and storages that are objects themselves.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch

from modelcache import _serialise_objects as objects
from modelcache import _serialise_special as special
from modelcache._serialise_objects import Refused
from modelcache._serialise_tensors import Rows, Storages

try:
    import cloudpickle

    _Base: Any = cloudpickle.Pickler
except ImportError:  # functions and classes without an importable name cannot travel then
    _Base = pickle.Pickler

PROTOCOL = 5
_IN_BAND_BYTES = 64 << 10  # buffers from here on become storages
_QUICK = frozenset({str, int, bool, float, type(None), dict, list, tuple, bytes, type})


class Pickler(_Base):
    """Pickles one object. What it refers to is in `rows`, `storages` and `extras` afterwards."""

    def __init__(
        self, file: io.BytesIO, references: Mapping[int, str], foreign: Mapping[int, str]
    ) -> None:
        super().__init__(file, PROTOCOL, buffer_callback=self._take_buffer)
        self.storages = Storages()
        self.rows = Rows(self.storages)
        self.extras: List[Tuple[Any, ...]] = []
        self.buffers: List[int] = []  # storages that are out of band, in order
        self.last: Any = None  # what it was at when it failed
        self.hook_id = -1  # the largest in use
        self.packages: Dict[str, str] = {}  # of code that came with models, and their folders
        self.fresh_locks: List[Any] = []  # that may be made anew
        self._references = references
        self._foreign = foreign
        self._extra_numbers: Dict[Any, int] = {}
        self._kept: List[Any] = []
        self.names = objects.Names()

    def persistent_id(self, value: Any) -> Optional[int]:
        self.last = value
        name = self._references.get(id(value)) if self._references else None
        if name is not None:
            return self._extra(("reference", name))
        kind = type(value)
        if kind in _QUICK:
            return None
        if self._foreign and id(value) in self._foreign:
            raise Refused(f"it shares a part of {self._foreign[id(value)]}")
        if isinstance(value, torch.Tensor):
            return self.rows.find(value)
        if kind is special.Numbered:
            return value.number
        if kind is torch.UntypedStorage:
            return self._extra(("storage", self.storages.number(value)))
        if isinstance(value, torch.storage.TypedStorage):
            number = self.storages.number(value._untyped_storage)
            return self._extra(("typed", number, value.dtype, id(value)), value)
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return special.reduce(value, self.rows, Refused)
        reduced = objects.reduce(self, value)
        if reduced is not NotImplemented:
            return reduced
        inherited = getattr(super(), "reducer_override", None)
        return NotImplemented if inherited is None else inherited(value)

    def _extra(self, extra: Tuple[Any, ...], kept: Any = None) -> int:
        number = self._extra_numbers.get(extra)
        if number is None:
            self.extras.append(extra)
            self._kept.append(kept)
            number = self._extra_numbers[extra] = -len(self.extras)
        return number

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """False: the buffer is out of band."""
        raw = buffer.raw()
        if raw.nbytes < _IN_BAND_BYTES:
            return True
        self.buffers.append(self.storages.number(_storage_over(raw)))
        return False


def _storage_over(raw: memoryview) -> torch.UntypedStorage:
    """The bytes of a buffer, in place: another object may show the same ones."""
    if raw.readonly:  # nobody can tell a copy from those
        raw = memoryview(bytearray(raw))
    return torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
