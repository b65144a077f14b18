"""Names for the tensors of an object, for people who look at its entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Tuple

import torch

from modelcache import _ffi
from modelcache._fill import Tensor
from modelcache._serialise_tensors import CONJUGATE, GRAD, NEGATIVE, PARAMETER

if TYPE_CHECKING:
    from modelcache._serialise import Dumped

_DEPTH = 8
_FLAGS = (
    (GRAD, _ffi.MC_TENSOR_REQUIRES_GRAD),
    (CONJUGATE, _ffi.MC_TENSOR_CONJUGATE),
    (NEGATIVE, _ffi.MC_TENSOR_NEGATIVE),
    (PARAMETER, _ffi.MC_TENSOR_PARAMETER),
)


def tensors(obj: Any, dumped: "Dumped") -> List[Tensor]:
    """The plain tensors that have a name: parameters, buffers, items of dicts and lists."""
    found: Dict[str, Tensor] = {}
    for name, tensor in _named(obj, "", _DEPTH):
        number = dumped.numbers.get(id(tensor))
        if number is not None and dumped.arena_numbers[number] is not None:
            found.setdefault(name or "tensor", _row(name or "tensor", number, dumped))
    return list(found.values())


def _row(name: str, number: int, dumped: "Dumped") -> Tensor:
    row = dumped.rows[number]
    flags = sum(theirs for ours, theirs in _FLAGS if row.flags & ours)
    return Tensor(
        name,
        str(row.dtype).partition(".")[2],
        row.shape,
        row.stride,
        dumped.arena_numbers[number],
        row.offset * row.dtype.itemsize,
        flags,
    )


def _named(value: Any, prefix: str, depth: int) -> Iterator[Tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield prefix, value
        return
    if isinstance(value, torch.nn.Module):
        for members in (value.named_parameters, value.named_buffers):
            for name, tensor in members(remove_duplicate=False):
                yield _joined(prefix, name), tensor
        return
    if depth:
        for name, item in _members(value):
            yield from _named(item, _joined(prefix, name), depth - 1)


def _members(value: Any) -> List[Tuple[str, Any]]:
    components = getattr(value, "components", None)  # of a diffusers pipeline
    if isinstance(value, dict) or isinstance(components, dict):
        table = value if isinstance(value, dict) else components
        return [(str(name), item) for name, item in table.items()]
    if isinstance(value, (list, tuple)):
        return [(str(number), item) for number, item in enumerate(value)]
    return []


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
