"""Whether an object that was made again is what it was: once for each entry, when it is made."""

from __future__ import annotations

import types
from typing import Any, Dict, List, Tuple

import torch

from modelcache import _serialise_special as special
from modelcache._serialise import Uncacheable
from modelcache._serialise_objects import is_importable
from modelcache._serialise_paths import ATOMS, Part, is_atom, parts, type_name

_UNSHARED = (tuple, frozenset)  # nobody can tell one of them from another with the same content
_FLOATS = (float, complex)  # with NaN and -0.0
_BY_CODE = (types.FunctionType, types.MethodType, types.BuiltinMethodType)


def verify(original: Any, rebuilt: Any) -> None:
    """Compares two objects in types, values, attributes, order, and what is the same object.

    Raises Uncacheable with the path of the first difference. Storages are compared by place: both
    objects lie over the same ones.
    """
    _Comparison().run(original, rebuilt)


class _Comparison:
    def __init__(self) -> None:
        self._forward: Dict[int, Any] = {}
        self._backward: Dict[int, Any] = {}
        self._kept: List[Any] = []  # parts may be made on the way: addresses must stay taken
        self._storages: Dict[int, int] = {}
        self._storages_back: Dict[int, int] = {}
        self._pending: List[Tuple[str, Any, Any]] = []

    def run(self, original: Any, rebuilt: Any) -> None:
        self._pending.append(("", original, rebuilt))
        while self._pending:
            path, one, other = self._pending.pop()
            if one is not other:
                self._compare(path, one, other)

    def _compare(self, path: str, one: Any, other: Any) -> None:
        kind = type(one)
        if not _same_class(kind, type(other)):
            raise _different(path, f"a {type_name(kind)} comes back as a {type_name(type(other))}")
        if kind in ATOMS:
            if repr(one) != repr(other) if kind in _FLOATS else one != other:
                raise _different(path, f"{one!r} comes back as {other!r}")
            return
        if is_atom(one):
            raise _different(path, f"{one!r} comes back as another {type_name(kind)}")
        if kind not in _UNSHARED and self._is_known(path, one, other):
            return
        if isinstance(one, torch.Tensor):
            self._compare_tensors(path, one, other)
        elif isinstance(one, torch.UntypedStorage):
            self._same_storage(path, one, other)
        elif isinstance(one, types.FunctionType) and one.__code__ != other.__code__:
            raise _different(path, "it comes back with other code")
        self._compare_parts(path, one, other)

    def _is_known(self, path: str, one: Any, other: Any) -> bool:
        """True for a pair that was met; raises when the two were met with others."""
        known = self._forward.get(id(one))
        if known is not None:
            if known is not other:
                what = type_name(type(one))
                raise _different(path, f"one {what} in two places comes back as two")
            return True
        if id(other) in self._backward:
            raise _different(path, f"two objects ({type_name(type(one))}) come back as one")
        self._forward[id(one)] = other
        self._backward[id(other)] = one
        self._kept.append((one, other))
        return False

    def _compare_parts(self, path: str, one: Any, other: Any) -> None:
        if isinstance(one, (set, frozenset)) and all(map(is_atom, one)):
            if one != other:
                raise _different(path, f"{one!r} comes back as {other!r}")
            return
        if type(one).__module__ == "numpy" and hasattr(one, "tobytes"):
            _compare_arrays(path, one, other)
            return
        if isinstance(one, torch.SymInt):
            return  # each ragged dimension has a number of its own
        mine, others = _ordered(parts(one)), _ordered(parts(other))
        if [label for label, _ in mine] != [label for label, _ in others]:
            raise _labels_differ(path, [label for label, _ in mine], [label for label, _ in others])
        if not mine and not isinstance(one, (dict, list, tuple, set, frozenset, torch.Tensor)):
            self._compare_opaque(path, one, other)
        pairs = [(path + label, part, more) for (label, part), (_, more) in zip(mine, others)]
        self._pending += reversed(pairs)

    def _compare_opaque(self, path: str, one: Any, other: Any) -> None:
        """Objects that show no parts, by what they give to pickle."""
        if isinstance(one, _BY_CODE):
            return
        try:
            mine, others = one.__reduce_ex__(4), other.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 - only its class knew how to make it again
            return
        if isinstance(mine, tuple) and isinstance(others, tuple) and mine[0] is not object:
            pairs = list(zip(mine[1:3], others[1:3]))
            self._kept.append(pairs)
            self._pending += [(path + ".<state>", part, more) for part, more in pairs]

    # ---- tensors --------------------------------------------------------------------------------

    def _compare_tensors(self, path: str, one: torch.Tensor, other: torch.Tensor) -> None:
        for what, read in _TRAITS.items():
            mine, others = read(one), read(other)
            if mine != others:
                raise _different(path, f"its {what} {mine} comes back as {others}")
        if hasattr(one, "__tensor_flatten__"):
            return  # its inner tensors are parts
        with torch._C.DisableTorchFunctionSubclass():
            if one.layout is not torch.strided or one.is_quantized or one.is_nested:
                self._pending.append((path, _components(one), _components(other)))
            elif one.grad_fn is not None:
                if not torch.equal(one.detach(), other.detach()):
                    raise _different(path, "it comes back with other values")
            else:
                self._compare_memory(path, one, other)

    def _compare_memory(self, path: str, one: torch.Tensor, other: torch.Tensor) -> None:
        if (one.stride(), one.storage_offset()) != (other.stride(), other.storage_offset()):
            raise _different(path, "it comes back with other strides or another offset")
        self._same_storage(path, one.untyped_storage(), other.untyped_storage())

    def _same_storage(self, path: str, one: Any, other: Any) -> None:
        mine, others = one._cdata, other._cdata
        self._kept.append((one, other))
        if self._storages.setdefault(mine, others) != others:
            raise _different(path, "tensors that share memory come back with one each")
        if self._storages_back.setdefault(others, mine) != mine:
            raise _different(path, "tensors with memory of their own come back sharing it")
        if one.nbytes() != other.nbytes() or one.device != other.device:
            raise _different(path, "its storage comes back with another size or device")


_TRAITS = {
    "dtype": lambda tensor: tensor.dtype,
    "shape": lambda tensor: "" if tensor.is_nested else str(tensor.shape),
    "device": lambda tensor: tensor.device,
    "layout": lambda tensor: tensor.layout,
    "requires_grad": lambda tensor: tensor.requires_grad,
    "conjugate bit": lambda tensor: tensor.is_conj(),
    "negative bit": lambda tensor: tensor.is_neg(),
    "inference mode": lambda tensor: tensor.is_inference(),
    "gradient function": lambda tensor: type(tensor.grad_fn).__name__,
}


def _same_class(one: type, other: type) -> bool:
    """Classes that are made at run time are told by their names."""
    if one is other:
        return True
    if one.__module__ != other.__module__ or one.__qualname__ != other.__qualname__:
        return False
    return not is_importable(one) and not is_importable(other)


def _ordered(found: List[Part]) -> List[Part]:
    """Items as they are, then attributes in an order of their own, as no program minds theirs."""
    attributes = [part for part in found if part[0].startswith(".")]
    items = [part for part in found if not part[0].startswith(".")]
    return items + sorted(attributes, key=lambda part: part[0])


def _components(tensor: torch.Tensor) -> Tuple[Any, ...]:
    return special.components(tensor, NotImplementedError)[1]


def _compare_arrays(path: str, one: Any, other: Any) -> None:
    for what in ("dtype", "shape", "strides"):
        if getattr(one, what) != getattr(other, what):
            raise _different(path, f"its {what} come back different")
    if one.tobytes() != other.tobytes() and not one.dtype.hasobject:
        raise _different(path, "it comes back with other values")


def _different(path: str, why: str) -> Uncacheable:
    return Uncacheable(path.lstrip("."), why)


def _labels_differ(path: str, mine: List[str], others: List[str]) -> Uncacheable:
    for label in mine:
        if label not in others:
            return _different(path + label, "it is lost")
    for label in others:
        if label not in mine:
            return _different(path + label, "it is new")
    return _different(path, "its parts come back in another order")
