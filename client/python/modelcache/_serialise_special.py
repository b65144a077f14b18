"""Tensors that are not plain: reduced to plain ones, and made from them again.

The functions that make them are named in streams. A tensor's class, the attributes hung on it and
its hooks are kept whatever the class does about pickling: a class that forgets its own state (as
those of quantised parameters do) would come back as something else.
"""

from __future__ import annotations

import copyreg
from typing import Any, Callable, Dict, Optional, Tuple

import torch

from modelcache._serialise_tensors import Rows, has_names

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

Reduced = Tuple[Any, ...]


class Numbered:
    """Stands for a row of the table in what the pickler saves."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def reduce(tensor: torch.Tensor, rows: Rows, refuse: Callable[[str], Exception]) -> Reduced:
    """As an object's __reduce_ex__; `refuse` makes the exception for what cannot travel."""
    if tensor.grad_fn is not None:
        raise refuse("a result of autograd (it has a grad_fn) cannot travel")
    kind = type(tensor)
    if _is_fake(tensor):
        raise refuse(f"a {kind.__name__} cannot travel")
    if kind.__reduce_ex__ is not torch.Tensor.__reduce_ex__ and _is_wrapper(tensor):
        return tensor.__reduce_ex__(5)
    if _is_wrapper(tensor):
        return _reduce_wrapper(tensor, refuse)
    core = _reduce_memory(tensor, rows, refuse)
    state = _state(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter) or core[0] is not _same:
        core = (_typed, (kind, *core, tensor.requires_grad))
    return (*core, state, None, None, set_state) if state else core


# ---- memory -------------------------------------------------------------------------------------


def _reduce_memory(
    tensor: torch.Tensor, rows: Rows, refuse: Callable[[str], Exception]
) -> Tuple[Any, Tuple[Any, ...]]:
    kind = type(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return components(tensor, refuse)
        plain = kind if kind in (torch.Tensor, torch.nn.Parameter) else torch.Tensor
        return _same, (Numbered(rows.add(tensor, plain)),)


def components(
    tensor: torch.Tensor, refuse: Callable[[str], Exception]
) -> Tuple[Any, Tuple[Any, ...]]:
    """What a tensor without a plain strided memory is made of: a function and its arguments."""
    if tensor.is_quantized:
        return _reduce_quantized(tensor, refuse)
    if tensor.layout is torch.sparse_coo:
        parts = (tensor._indices(), tensor._values())
        return _sparse, (*parts, tuple(tensor.shape), tensor.is_coalesced())
    if tensor.layout in _COMPRESSED:
        return _compressed, (tensor.layout, *_compressed_parts(tensor), tuple(tensor.shape))
    if tensor.is_nested and tensor.layout is torch.strided:
        nested = (
            tensor.values(),
            tensor._nested_tensor_size(),
            tensor._nested_tensor_strides(),
            tensor._nested_tensor_storage_offsets(),
        )
        return torch._utils._rebuild_nested_tensor, nested
    raise refuse(f"a tensor of layout {tensor.layout} cannot travel")


def _compressed_parts(tensor: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def _reduce_quantized(
    tensor: torch.Tensor, refuse: Callable[[str], Exception]
) -> Tuple[Any, Tuple[Any, ...]]:
    scheme = tensor.qscheme()
    if scheme == torch.per_tensor_affine:
        quantizer: Tuple[Any, ...] = (scheme, tensor.q_scale(), tensor.q_zero_point())
    elif scheme in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        quantizer = (
            scheme,
            tensor.q_per_channel_scales(),
            tensor.q_per_channel_zero_points(),
            tensor.q_per_channel_axis(),
        )
    else:
        raise refuse(f"a tensor quantised as {scheme} cannot travel")
    layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return _quantized, (tensor.untyped_storage(), tensor.dtype, *layout, quantizer)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _sparse(
    indices: torch.Tensor, values: torch.Tensor, shape: Tuple[int, ...], coalesced: bool
) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices, values, shape, check_invariants=False, is_coalesced=coalesced
    )


def _compressed(
    layout: torch.layout,
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    shape: Tuple[int, ...],
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, check_invariants=False
    )


def _quantized(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: Tuple[int, ...],
    stride: Tuple[int, ...],
    quantizer: Tuple[Any, ...],
) -> torch.Tensor:
    if quantizer[0] == torch.per_tensor_affine:
        tensor = torch._empty_affine_quantized(
            shape, scale=quantizer[1], zero_point=quantizer[2], dtype=dtype
        )
    else:
        tensor = torch._empty_per_channel_affine_quantized(
            shape, scales=quantizer[1], zero_points=quantizer[2], axis=quantizer[3], dtype=dtype
        )
    return tensor.set_(storage, offset, shape, stride)


# ---- classes ------------------------------------------------------------------------------------


def _typed(
    kind: type, make: Callable[..., torch.Tensor], parts: Tuple[Any, ...], requires_grad: bool
) -> torch.Tensor:
    """A tensor of a class over the memory of another, without the class's constructor."""
    tensor = make(*parts)
    if kind is torch.Tensor:
        return tensor.requires_grad_(requires_grad) if requires_grad else tensor
    return torch.Tensor._make_subclass(kind, tensor, requires_grad)


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """True for a tensor without memory of its own, that consists of others."""
    return hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")


def _is_fake(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or _is_wrapper(tensor):
        return False
    try:  # a class with a dispatch of its own and no bytes
        storage = tensor.untyped_storage()
        return tensor.device.type != "meta" and storage.nbytes() > 0 and not storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        return True


def _reduce_wrapper(tensor: torch.Tensor, refuse: Callable[[str], Exception]) -> Reduced:
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    try:
        shape = tuple(int(size) for size in tensor.shape)
        stride = tuple(int(step) for step in tensor.stride())
    except (RuntimeError, TypeError) as failure:
        raise refuse(f"a {type(tensor).__name__} of symbolic shape cannot travel") from failure
    arguments = (type(tensor), inner, context, shape, stride, tensor.requires_grad)
    state = _state(tensor)
    return (
        (_unflatten, arguments, state, None, None, set_state)
        if state
        else (
            _unflatten,
            arguments,
        )
    )


def _unflatten(
    kind: Any,
    inner: Dict[str, torch.Tensor],
    context: Any,
    shape: Tuple[int, ...],
    stride: Tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    tensor = kind.__tensor_unflatten__(inner, context, shape, stride)
    return tensor.requires_grad_() if requires_grad and not tensor.requires_grad else tensor


# ---- what hangs on a tensor ---------------------------------------------------------------------


def _state(tensor: torch.Tensor) -> Optional[Dict[str, Any]]:
    state: Dict[str, Any] = {}
    if tensor.__dict__:
        state["attributes"] = dict(tensor.__dict__)
    slots = {
        name: getattr(tensor, name)
        for name in copyreg._slotnames(type(tensor)) or ()
        if hasattr(tensor, name)
    }
    if slots:
        state["slots"] = slots
    if tensor._backward_hooks:
        state["hooks"] = tensor._backward_hooks
    if getattr(tensor, "_post_accumulate_grad_hooks", None):
        state["grad_hooks"] = tensor._post_accumulate_grad_hooks
    if has_names(tensor):
        state["names"] = tensor.names
    return state or None


def set_state(tensor: torch.Tensor, state: Dict[str, Any]) -> None:
    tensor.__dict__.update(state.get("attributes", {}))
    for name, value in state.get("slots", {}).items():
        object.__setattr__(tensor, name, value)
    if "hooks" in state:
        tensor._backward_hooks = state["hooks"]
    if "grad_hooks" in state:
        tensor._post_accumulate_grad_hooks = state["grad_hooks"]
    if "names" in state:
        with torch.no_grad():
            tensor.rename_(*state["names"])
