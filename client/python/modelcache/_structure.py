"""The nested structure of a checkpoint: from the manifest's JSON nodes back to Python objects.

docs/protocol.md lists the nodes.
"""

from __future__ import annotations

import base64
import collections
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from modelcache import _ffi
from modelcache._errors import Error


class Opaque:
    """Stands where a checkpoint had an object that is not kept: only its class is known."""

    def __init__(self, qualified_name: str) -> None:
        self.qualified_name = qualified_name

    def __repr__(self) -> str:
        return f"<modelcache.Opaque {self.qualified_name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.qualified_name == self.qualified_name

    def __hash__(self) -> int:
        return hash(self.qualified_name)


def rebuild(node: Any, tensor: Callable[[int], Any]) -> Any:
    """The object a node describes; `tensor` gives a tensor by number.

    Raises the package's error with status "corrupt" for a node that describes no object: an
    attribute on a plain dict, a key that cannot be hashed.
    """
    try:
        return _rebuild(node, tensor)
    except Error:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise _ffi.error("corrupt", f"the checkpoint's structure describes no object: {e}") from e


def _rebuild(node: Any, tensor: Callable[[int], Any]) -> Any:
    if not isinstance(node, dict):
        return node
    for kind, build in _BUILDERS.items():
        if kind in node:
            return build(node, tensor)
    raise ValueError(f"unknown structure node with members {sorted(node)}")


def version_metadata(node: Any) -> Optional[Any]:
    """`_metadata` of the dict at the root, None when it has none."""
    if isinstance(node, dict) and "_metadata" in node.get("attrs", {}):
        return rebuild(node["attrs"]["_metadata"], _no_tensor)
    return None


def same_objects(node: Any) -> Dict[int, int]:
    """Tensor numbers that are the same object as another: number to the other's number."""
    return {n["t"]: n["is"] for n in _walk(node) if "t" in n and "is" in n}


def _walk(root: Any) -> Iterator[Dict[str, Any]]:
    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield node
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)


def _no_tensor(number: int) -> Any:
    raise ValueError(f"tensor {number} where no tensor can be")


def _dict(node: Dict[str, Any], tensor: Callable[[int], Any]) -> Any:
    kind = node.get("type", "dict")
    made: Any = {}
    if kind == "OrderedDict":
        made = collections.OrderedDict()
    elif kind == "defaultdict":
        made = collections.defaultdict()
    for key, value in node["d"]:
        made[_rebuild(key, tensor)] = _rebuild(value, tensor)
    for name, value in node.get("attrs", {}).items():
        setattr(made, name, _rebuild(value, tensor))
    return made


def _items(node: List[Any], tensor: Callable[[int], Any]) -> Iterator[Any]:
    return (_rebuild(item, tensor) for item in node)


def _torch(name: str, *arguments: Any) -> Any:
    import torch

    return getattr(torch, name)(*arguments)


def _dtype(node: Dict[str, Any], _tensor: Callable[[int], Any]) -> Any:
    import torch

    return getattr(torch, node["dtype"], None) or Opaque(f"torch.{node['dtype']}")


def _tensor(node: Dict[str, Any], tensor: Callable[[int], Any]) -> Any:
    return tensor(node.get("is", node["t"]))


_BUILDERS: Dict[str, Callable[[Dict[str, Any], Callable[[int], Any]], Any]] = {
    "t": _tensor,
    "d": _dict,
    "l": lambda node, tensor: list(_items(node["l"], tensor)),
    "u": lambda node, tensor: tuple(_items(node["u"], tensor)),
    "set": lambda node, tensor: set(_items(node["set"], tensor)),
    "int": lambda node, tensor: int(node["int"]),
    "float": lambda node, tensor: float(node["float"]),
    "bytes": lambda node, tensor: base64.b64decode(node["bytes"]),
    "complex": lambda node, tensor: complex(*_items(node["complex"], tensor)),
    "size": lambda node, tensor: _torch("Size", node["size"]),
    "dtype": _dtype,
    "device": lambda node, tensor: _torch("device", node["device"]),
    "opaque": lambda node, tensor: Opaque(node["opaque"]),
}

__all__: Tuple[str, ...] = ("Opaque", "rebuild", "same_objects", "version_metadata")
