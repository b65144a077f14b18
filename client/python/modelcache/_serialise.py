"""Objects as a pickle stream and storages beside it, and back, without copying a storage.

A stream is a header, which has the tensors as a table, and a pickle that names them by number. Both
are read in place. Whoever loads a stream runs what its writer put there: only the user's own loader
writes them, only the same user's processes read them.
"""

from __future__ import annotations

import gc
import hashlib
import io
import pickle
import sys
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Set,
    Tuple,
    Union,
)

import torch

from modelcache import _serialise_objects
from modelcache._serialise_objects import Refused
from modelcache._serialise_paths import path_to, type_name
from modelcache._serialise_pickler import PROTOCOL, Pickler
from modelcache._serialise_tensors import (
    Builder,
    Row,
    StorageSource,
    Table,
    Window,
    describe,
    versions,
)

if TYPE_CHECKING:
    from modelcache._entry import Entry

_SIZE_BYTES = 8  # of the header's length, before it
_RECURSION = 20_000
_MESSAGE = 300  # characters kept of what others say

Stream = Union[bytes, bytearray, memoryview]


class Uncacheable(Exception):
    """An object that would not come back as it was: `path` is the part of it, `why` the reason."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}" if path else why)
        self.path = path
        self.why = why

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self.path, self.why)


class Dumped(NamedTuple):
    stream: bytes
    storages: List[torch.UntypedStorage]  # in the CPU's memory, by number
    rows: List[Row]  # the tensors, by number
    arena_numbers: List[Optional[int]]  # of each row, the storage it lies in; None without one
    numbers: Dict[int, int]  # id of a tensor of the object: its row
    kept: Any  # what the ids and storages belong to


class _Header(NamedTuple):
    table: Table
    extras: List[Tuple[Any, ...]]
    buffers: List[int]
    packages: Dict[str, str]
    hook_id: int


# ---- writing ------------------------------------------------------------------------------------


def dump(
    obj: Any,
    references: Optional[Mapping[int, str]] = None,
    foreign: Optional[Mapping[int, str]] = None,
) -> Dumped:
    """The stream and the storages of an object. Raises Uncacheable.

    `references`: ids of objects that are written as a name, which `load` gets the object for.
    `foreign`: ids of parts of those, with what they are a part of: an object that has one of them
    otherwise than through its owner cannot be made again.
    """
    pickler, body = _pickle(obj, references or {}, foreign or {}, Pickler)
    arena, places = pickler.storages.place()
    table = describe(pickler.rows, pickler.storages, places)
    header = _Header(table, pickler.extras, pickler.buffers, pickler.packages, pickler.hook_id)
    text = pickle.dumps(tuple(header), PROTOCOL)
    stream = len(text).to_bytes(_SIZE_BYTES, "little") + text + body
    rows = pickler.rows
    numbers = [_arena_number(places[row.storage]) for row in rows.rows]
    return Dumped(stream, arena, rows.rows, numbers, rows.numbers(), (pickler, obj))


def _arena_number(place: Any) -> Optional[int]:
    return place if isinstance(place, int) else None


def _pickle(
    obj: Any, references: Mapping[int, str], foreign: Mapping[int, str], kind: Any
) -> Tuple[Any, bytes]:
    file = io.BytesIO()
    pickler = kind(file, references, foreign)
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(max(limit, _RECURSION))
        pickler.dump(obj)
    except RecursionError as failure:
        raise Uncacheable("", "nested too deeply") from failure
    except Exception as failure:
        raise Uncacheable(path_to(obj, pickler.last), _reason(failure, pickler.last)) from failure
    finally:
        sys.setrecursionlimit(limit)
    return pickler, file.getvalue()


def _reason(failure: Exception, culprit: Any) -> str:
    if isinstance(failure, Refused):
        return str(failure)
    kind = type(culprit)
    if kind.__module__ == "_thread" and kind.__name__ in ("lock", "RLock"):
        return "a lock cannot travel"
    return f"a {type_name(kind)} cannot travel ({_shown(failure)})"


def _shown(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure)[:_MESSAGE]}"


# ---- reading ------------------------------------------------------------------------------------


class _InPlace:
    """A file for the unpickler that shows it all bytes at its first look, where they are."""

    __slots__ = ("_view",)

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def peek(self, size: int) -> memoryview:
        return self._view

    def read(self, size: int) -> memoryview:
        taken, self._view = self._view[:size], self._view[size:]
        return taken

    def readline(self) -> memoryview:
        raise pickle.UnpicklingError("a stream has no lines")


def load(
    stream: Stream,
    storage: StorageSource,
    references: Optional[Mapping[str, Any]] = None,
    window: Optional[Window] = None,
) -> Any:
    """The object of a stream.

    `storage` gives the storages of `Dumped.storages` by number, new ones at each load; `references`
    has the objects that were written as names; `window` saves a storage for each tensor.
    """
    return _load(stream, storage, references or {}, window)[0]


def load_entry(entry: "Entry", references: Optional[Mapping[str, Any]] = None) -> Any:
    """The object of an entry that the loader made, over its memory."""
    stream = entry.raw(entry.metadata["python"]["stream"])
    return load(stream, entry.storage, references, _window(entry))


def _window(entry: "Entry") -> Window:
    tables = entry._tables()
    return Window(tables.whole(), [address - tables.low for address in tables.addresses])


def load_back(dumped: Dumped, references: Optional[Mapping[str, Any]] = None) -> Any:
    """A second object over the very storages of the first, for `verify`. Raises Uncacheable."""
    try:
        obj, tensors, before = _load(
            dumped.stream, dumped.storages.__getitem__, references or {}, None
        )
    except Exception as failure:
        raise Uncacheable("", f"it cannot be made again ({_shown(failure)})") from failure
    if versions(tensors) != before:
        raise Uncacheable("", "its classes write to its tensors when it is made again")
    return obj


def _load(
    stream: Stream,
    storage: StorageSource,
    references: Mapping[str, Any],
    window: Optional[Window],
) -> Tuple[Any, List[torch.Tensor], List[int]]:
    """The object, its tensors, and what their versions were before there was an object."""
    view = memoryview(stream)
    end = _SIZE_BYTES + int.from_bytes(view[:_SIZE_BYTES], "little")
    header = _Header._make(pickle.loads(view[_SIZE_BYTES:end]))
    if header.packages or header.hook_id >= 0:
        _serialise_objects.prepare(header.packages, header.hook_id)
    # Thousands of new objects would set off the collector, which looks at all there are.
    collecting = gc.isenabled()
    gc.disable()
    try:
        builder = Builder(Table._make(header.table), storage, window)
        table = builder.tensors()
        before = [] if window else versions(table)
        for extra in reversed(header.extras):
            table.append(_open_extra(extra, builder, references))
        buffers = [_buffer(builder.storage(number)) for number in header.buffers]
        file: Any = _InPlace(view[end:])
        unpickler = pickle.Unpickler(file, buffers=buffers)
        unpickler.persistent_load = table.__getitem__  # type: ignore[method-assign]
        return unpickler.load(), table[: len(before)], before
    finally:
        if collecting:
            gc.enable()


def _open_extra(extra: Tuple[Any, ...], builder: Builder, references: Mapping[str, Any]) -> Any:
    kind = extra[0]
    if kind == "reference":
        return references[extra[1]]
    opened = builder.storage(extra[1])
    if kind == "storage":
        return opened
    return torch.storage.TypedStorage(wrap_storage=opened, dtype=extra[2], _internal=True)


def _buffer(storage: torch.UntypedStorage) -> memoryview:
    return memoryview(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())


# ---- whether an object was edited ---------------------------------------------------------------


class _StructurePickler(Pickler):
    """Gives the same bytes for the same structure in every process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.visited: Set[int] = set()

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if (kind is set or kind is frozenset) and all(type(item) is str for item in value):
            return (kind.__name__, *sorted(value))  # hashes of texts differ between processes
        if isinstance(value, (torch.Tensor, torch.nn.Module)):
            self.visited.add(id(value))
        return super().persistent_id(value)


class Structure(NamedTuple):
    digest: bytes  # of all but the bytes of tensors; the same in every process
    memory: bytes  # of where the tensors lie and how often they were written to
    parts: Set[int]  # ids of the tensors and modules in it


def structure(obj: Any) -> Structure:
    """What an object consists of, without the bytes of its tensors. Raises Uncacheable."""
    pickler, body = _pickle(obj, {}, {}, _StructurePickler)
    rows = pickler.rows
    described = [(str(row.dtype), *row[1:]) for row in rows.rows]
    text = repr((described, pickler.extras, pickler.packages)).encode()
    memory = [storage.data_ptr() for storage in pickler.storages.all if storage.nbytes()]
    memory += versions(rows.tensors)
    return Structure(
        hashlib.blake2b(text + body, digest_size=16).digest(),
        hashlib.blake2b(repr(memory).encode(), digest_size=16).digest(),
        pickler.visited,
    )


def fingerprint(obj: Any) -> bytes:
    """Changes when the object is edited: its structure, its attributes, or its tensors in place.

    Writes that torch does not count (through `.data` or `.numpy()`) do not show here; pages of an
    entry that were written to do, see Entry.dirty. For this process alone. Raises Uncacheable.
    """
    found = structure(obj)
    return found.digest + found.memory
