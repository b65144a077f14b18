"""Libraries whose objects only travel when something in them is replaced, on both sides."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pickle
from typing import Any, Tuple

_MARK = "_modelcache"  # on a module that was changed


def prepare_loader() -> None:
    """Before the call: what is made then must be such that it can travel."""
    if importlib.util.find_spec("sfast") is None:
        return
    with contextlib.suppress(ImportError):  # installed, and not for this torch
        stable_fast()
        # It hangs an object of Python's on script modules, to clean up; archives have none.
        utils = importlib.import_module("sfast.jit.utils")
        utils.attach_script_module_clear_hook = lambda *_, **__: None


def stable_fast() -> None:
    """A dataclass that a traced module gives back is told by the pickle of its class.

    stable-fast keeps the class as an attribute of a constant, which no archive has.
    """
    flat = importlib.import_module("sfast.utils.flat_tensors")
    if getattr(flat, _MARK, False):
        return
    setattr(flat, _MARK, True)
    unflatten_theirs = flat.unflatten_dataclass

    def flatten_dataclass(obj: Any) -> Tuple[Any, ...]:
        import dataclasses

        fields = {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}
        return flat.flatten_bytes(pickle.dumps(type(obj))) + flat.flatten_dict(fields)

    def unflatten_dataclass(tensors: Any, start: int) -> Tuple[Any, int]:
        if isinstance(tensors[start], flat.ObjectTensor):  # from a module that was traced before
            return unflatten_theirs(tensors, start)
        kind, start = flat.unflatten_bytes(tensors, start)
        fields, start = flat.unflatten_dict(tensors, start)
        return pickle.loads(kind)(**fields), start

    flat.flatten_dataclass = flatten_dataclass
    flat.unflatten_dataclass = unflatten_dataclass
