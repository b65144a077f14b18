"""Tensors and storages: how a stream describes them, and how they are made from it.

Nearly all tensors of a model are plain: strided, of class Tensor or Parameter, with nothing hung on
them. They are rows of a table and built in one loop; the pickle names them by number. Everything
else is reduced to plain ones in _serialise_special.
"""

from __future__ import annotations

import ctypes
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

GRAD, PARAMETER, CONJUGATE, NEGATIVE, INFERENCE = 1, 2, 4, 8, 16

# A tensor of any dtype must start from some bytes before `set_` points it at its storage;
# torch.empty would warn for some dtypes.
_SEED = (ctypes.c_char * 32)()
_CPU = torch.device("cpu")
_NAMED = hasattr(torch.Tensor, "has_names")
_ATOMS = (bool, int, float, str, type(None))  # attributes of these types are kept in the table

StorageSource = Callable[[int], torch.UntypedStorage]


class Window(NamedTuple):
    """All storages of an entry in one buffer: tensors are made from it without a storage each."""

    buffer: Any
    offsets: Sequence[int]  # of each storage in it


class Row(NamedTuple):
    """A plain tensor. `storage` is a number of the stream's storages; offset in elements."""

    dtype: torch.dtype
    storage: int
    offset: int
    shape: Tuple[int, ...]
    stride: Tuple[int, ...]
    flags: int


class Storages:
    """The storages a stream refers to, each once, in the order of first use."""

    def __init__(self) -> None:
        self.all: List[torch.UntypedStorage] = []
        self._numbers: Dict[int, int] = {}
        self.uses: List[int] = []

    def number(self, storage: torch.UntypedStorage) -> int:
        found = self._numbers.get(storage._cdata)
        if found is None:
            found = self._numbers[storage._cdata] = len(self.all)
            self.all.append(storage)  # kept: what has gone would give its address to another
            self.uses.append(0)
        self.uses[found] += 1
        return found

    def place(self) -> Tuple[List[torch.UntypedStorage], List[Any]]:
        """What goes into the arena, and for each storage where it is: see `open_storage`."""
        arena: List[torch.UntypedStorage] = []
        places: List[Any] = [None] * len(self.all)
        for group in self._groups():
            first = self.all[group[0]]
            if first.device.type == "meta":
                places[group[0]] = ("meta", first.nbytes())
            elif not first.nbytes():
                places[group[0]] = ("empty", str(first.device))
            elif len(group) > 1:
                _place_overlapping([self.all[number] for number in group], group, arena, places)
            else:
                on_cpu = first.device == _CPU
                places[group[0]] = (
                    len(arena) if on_cpu else ("device", len(arena), str(first.device))
                )
                arena.append(first if on_cpu else first.cpu())
        return arena, places

    def _groups(self) -> List[List[int]]:
        """Numbers of storages whose bytes overlap, together; groups in order of first use."""
        spans = sorted(
            (storage.data_ptr(), storage.data_ptr() + storage.nbytes(), number)
            for number, storage in enumerate(self.all)
            if storage.device == _CPU and storage.nbytes()
        )
        group_of = {number: [number] for number in range(len(self.all))}
        reach, last = 0, -1
        for start, end, number in spans:
            if start < reach:
                group_of[last].append(number)
                group_of[number] = group_of[last]
            else:
                last = number
            reach = max(reach, end)
        seen = {}
        for number in range(len(self.all)):
            seen.setdefault(id(group_of[number]), group_of[number])
        return list(seen.values())


def _place_overlapping(
    parts: List[torch.UntypedStorage], numbers: List[int], arena: List[Any], places: List[Any]
) -> None:
    """Storages over the same bytes: the union is kept, each is a slice of it."""
    start = min(part.data_ptr() for part in parts)
    end = max(part.data_ptr() + part.nbytes() for part in parts)
    raw = (ctypes.c_char * (end - start)).from_address(start)
    union = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    union._modelcache_parts = parts  # the bytes are theirs
    for part, number in zip(parts, numbers):
        first = part.data_ptr() - start
        places[number] = ("slice", len(arena), first, first + part.nbytes())
    arena.append(union)


def open_storage(place: Any, source: StorageSource) -> torch.UntypedStorage:
    """The storage at a place that `Storages.place` gave."""
    if isinstance(place, int):
        return source(place)
    kind = place[0]
    if kind == "empty":
        return torch.UntypedStorage(0, device=place[1])
    if kind == "meta":
        return torch.UntypedStorage(place[1], device="meta")
    if kind == "slice":
        return source(place[1])[place[2] : place[3]]
    stored = torch.empty(0, dtype=torch.uint8).set_(source(place[1]))
    return stored.to(place[2]).untyped_storage()


class Rows:
    """The plain tensors of a stream, by number."""

    def __init__(self, storages: Storages) -> None:
        self.rows: List[Row] = []
        self._storages = storages
        self._numbers: Dict[int, int] = {}
        self.tensors: List[torch.Tensor] = []  # kept alive, as the storages

    def find(self, tensor: torch.Tensor) -> Optional[int]:
        """The number of a tensor, None when it is not plain."""
        number = self._numbers.get(id(tensor))
        if number is None and _is_plain(tensor):
            number = self._numbers[id(tensor)] = self.add(tensor, type(tensor))
        return number

    def numbers(self) -> Dict[int, int]:
        """By the id of the tensor."""
        return self._numbers

    def attributes(self) -> List[Tuple[Dict[str, Any], List[int]]]:
        """What hangs on plain tensors; those with the same are together."""
        groups: Dict[Any, Tuple[Dict[str, Any], List[int]]] = {}
        for number in self._numbers.values():
            hung = self.tensors[number].__dict__
            if hung:
                key = tuple((name, type(value), value) for name, value in hung.items())
                groups.setdefault(key, (dict(hung), []))[1].append(number)
        return list(groups.values())

    def add(self, tensor: torch.Tensor, kind: type) -> int:
        """A row for the strided memory of a tensor, as a `kind` (Tensor or Parameter)."""
        flags = GRAD * tensor.requires_grad | PARAMETER * (kind is torch.nn.Parameter)
        flags |= CONJUGATE * tensor.is_conj() | NEGATIVE * tensor.is_neg()
        flags |= INFERENCE * tensor.is_inference()
        storage = self._storages.number(tensor.untyped_storage())
        shape, stride = tuple(tensor.shape), tensor.stride()
        self.rows.append(Row(tensor.dtype, storage, tensor.storage_offset(), shape, stride, flags))
        self.tensors.append(tensor)
        return len(self.rows) - 1


def has_names(tensor: torch.Tensor) -> bool:
    """Whether its dimensions have names, where torch still has them."""
    return _NAMED and tensor.has_names()


def _is_plain(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    return (
        (kind is torch.Tensor or kind is torch.nn.Parameter)
        and tensor.layout is torch.strided
        and all(type(value) in _ATOMS for value in tensor.__dict__.values())
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.grad_fn is None
        and tensor._backward_hooks is None
        and getattr(tensor, "_post_accumulate_grad_hooks", None) is None
        and not has_names(tensor)
        and not (tensor.requires_grad and tensor.is_inference())
    )


# ---- the table in a stream ----------------------------------------------------------------------


class Table(NamedTuple):
    """What a stream's header has of its tensors, in columns that load quickly."""

    count: int
    places: List[Any]
    whole: List[Tuple[str, List[Any]]]  # by dtype: number, storage, elements, flags, shape, stride
    strided: List[Tuple[Any, ...]]  # number, dtype, then as Row
    attributes: List[Tuple[Dict[str, Any], List[int]]]  # and the numbers that have them


def describe(rows: Rows, storages: Storages, places: List[Any]) -> Table:
    whole: Dict[str, List[Any]] = {}
    strided: List[Tuple[Any, ...]] = []
    for number, row in enumerate(rows.rows):
        name = str(row.dtype).partition(".")[2]
        if _covers_storage(row, rows.tensors[number], storages, places):
            elements = rows.tensors[number].numel()
            flat = row.shape == (elements,) and row.stride == (1,)
            shape = None if flat else row.shape
            whole.setdefault(name, []).extend(
                (number, places[row.storage], elements, row.flags, shape, row.stride)
            )
        else:
            strided.append((number, name, *row[1:]))
    return Table(len(rows.rows), places, list(whole.items()), strided, rows.attributes())


def _covers_storage(row: Row, tensor: torch.Tensor, storages: Storages, places: List[Any]) -> bool:
    """True for a tensor that has its storage for itself, whole."""
    return (
        isinstance(places[row.storage], int)
        and storages.uses[row.storage] == 1
        and row.offset == 0
        and row.flags & ~(GRAD | PARAMETER) == 0
        and storages.all[row.storage].nbytes() == tensor.numel() * tensor.element_size()
    )


class Builder:
    """The plain tensors and the storages of a stream, made once each."""

    def __init__(self, table: Table, source: StorageSource, window: Optional[Window]) -> None:
        self._table = table
        self._source = source
        self._window = window
        self._opened: Dict[int, torch.UntypedStorage] = {}
        self._slices: Dict[int, torch.UntypedStorage] = {}

    def storage(self, number: int) -> torch.UntypedStorage:
        opened = self._opened.get(number)
        if opened is None:
            opened = open_storage(self._table.places[number], self._once)
            self._opened[number] = opened
        return opened

    def _once(self, arena_number: int) -> torch.UntypedStorage:
        """Slices of one storage must be of one."""
        made = self._slices.get(arena_number)
        if made is None:
            made = self._slices[arena_number] = self._source(arena_number)
        return made

    def tensors(self) -> List[torch.Tensor]:
        made: List[Any] = [None] * self._table.count
        with torch._C.DisableTorchFunction():  # a default device is not for these
            for name, columns in self._table.whole:
                dtype = getattr(torch, name)
                if self._window is None or not _fill_whole(made, dtype, columns, self._window):
                    self._fill_from_storages(made, dtype, columns)
            for row in self._table.strided:
                made[row[0]] = self._strided(*row[1:])
        for hung, numbers in self._table.attributes:
            for number in numbers:
                made[number].__dict__.update(hung)
        return made

    def _fill_from_storages(self, made: List[Any], dtype: torch.dtype, columns: List[Any]) -> None:
        each = iter(columns)
        for number, storage, elements, flags, shape, stride in zip(*[each] * 6):
            tensor = _seed(dtype, _CPU)
            tensor.set_(self._once(storage), 0, (elements,) if shape is None else shape, stride)
            made[number] = _with_flags(tensor, flags)

    def _strided(
        self,
        name: str,
        storage: int,
        offset: int,
        shape: Tuple[int, ...],
        stride: Tuple[int, ...],
        flags: int,
    ) -> torch.Tensor:
        memory = self.storage(storage)
        with torch.inference_mode(bool(flags & INFERENCE)):
            tensor = _seed(getattr(torch, name), memory.device, bool(flags & INFERENCE))
            tensor.set_(memory, offset, shape, stride)
            return _with_flags(tensor, flags)


def _fill_whole(made: List[Any], dtype: torch.dtype, columns: List[Any], window: Window) -> bool:
    """False when torch makes no tensor of this dtype from a buffer."""
    buffer, offsets = window
    frombuffer, parameter = torch.frombuffer, torch.nn.Parameter
    each = iter(columns)
    try:
        for number, storage, elements, flags, shape, stride in zip(
            each, each, each, each, each, each
        ):
            tensor = frombuffer(buffer, dtype=dtype, count=elements, offset=offsets[storage])
            if shape is not None:
                tensor.as_strided_(shape, stride)  # in place: a view would remember what it is of
            if flags & PARAMETER:
                tensor.__class__ = parameter
            if flags & GRAD:
                tensor.requires_grad_()
            made[number] = tensor
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def _seed(dtype: torch.dtype, device: torch.device, inference: bool = False) -> torch.Tensor:
    if device == _CPU and not inference:
        return torch.frombuffer(_SEED, dtype=dtype, count=1)
    return torch.empty(0, dtype=dtype, device=device)


def _with_flags(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    if flags & (CONJUGATE | NEGATIVE):
        bits = {"conj": CONJUGATE, "neg": NEGATIVE}
        set_bits = {name: True for name, bit in bits.items() if flags & bit}
        torch._utils.set_tensor_metadata(tensor, set_bits)
    if flags & PARAMETER:
        tensor.__class__ = torch.nn.Parameter
    return tensor.requires_grad_() if flags & GRAD else tensor


def versions(tensors: Sequence[torch.Tensor]) -> List[int]:
    """How often each was written to; inference tensors do not count."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
