"""Round trips through the serialiser, over memory as an entry's would be."""

import ctypes

import torch
from modelcache._serialise import dump, load, load_back
from modelcache._serialise_tensors import Window
from modelcache._verify import verify

_ALIGNMENT = 64


class Arena:
    """The bytes of a dump's storages in memory of its own, as an entry shows them."""

    def __init__(self, dumped):
        self._sizes = [storage.nbytes() for storage in dumped.storages]
        self.offsets, end = [], 0
        for size in self._sizes:
            self.offsets.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.buffer = (ctypes.c_char * (end + _ALIGNMENT))()
        for number, storage in enumerate(dumped.storages):
            self.storage(number).copy_(storage)

    def storage(self, number):
        if not self._sizes[number]:
            return torch.UntypedStorage(0)
        return torch.frombuffer(
            self.buffer,
            dtype=torch.uint8,
            count=self._sizes[number],
            offset=self.offsets[number],
        ).untyped_storage()

    def window(self):
        return Window(self.buffer, self.offsets)


def reload(dumped, references=None):
    arena = Arena(dumped)
    return load(dumped.stream, arena.storage, references, arena.window())


def round_trip(value):
    """The value as a client would get it, after what the loader does before it lets it go."""
    dumped = dump(value)
    verify(value, load_back(dumped))
    return reload(dumped)


def storage_bytes(value):
    """How many bytes of storages a value takes in the cache."""
    return sum(storage.nbytes() for storage in dump(value).storages)
