"""Tensors over the memory of a model: one torch storage for each of its storages, no copies."""

from __future__ import annotations

import ctypes
import json
from typing import Any, Dict, List, Optional, Tuple

import torch

from modelcache import _ffi
from modelcache._model import Tables

_VIEW_FLAGS = _ffi.MC_TENSOR_CONJUGATE | _ffi.MC_TENSOR_NEGATIVE
_QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")

# A tensor of any dtype must start from some bytes before `set_` points it at its storage;
# torch.empty would warn for some dtypes.
_SEED = (ctypes.c_char * 16)()

_MANY = 8  # who asks for that many tensors one by one is asking for all

_CAPSULE_NAME = b"dltensor"  # capsules keep a pointer to it
_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_from_dlpack = getattr(torch._C, "_from_dlpack", torch.utils.dlpack.from_dlpack)
_DELETER_OFFSET = 56  # in DLManagedTensor


def _delete_dlpack(struct: int) -> None:
    deleter = ctypes.c_void_p.from_address(struct + _DELETER_OFFSET).value
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter or 0)(struct)


def make_storage(tables: Tables, number: int) -> torch.UntypedStorage:
    """A torch storage of exactly the bytes of a storage of the model, which it keeps mapped."""
    nbytes = tables.storage_bytes[number]
    if not nbytes:  # torch.frombuffer refuses empty buffers
        return torch.UntypedStorage(0)
    offset = tables.addresses[number] - tables.low
    return torch.frombuffer(
        tables.whole(), dtype=torch.uint8, count=nbytes, offset=offset
    ).untyped_storage()


class TensorBuilder:
    """Builds each tensor of a model once. Any thread, no locks: the first one built is kept."""

    def __init__(self, tables: Tables, metadata: bytes, model: str, format: str) -> None:
        self._tables = tables
        self._model = model
        self._tensors: Dict[int, torch.Tensor] = {}
        self._storages: Dict[int, torch.UntypedStorage] = {}
        self._dtypes: Dict[int, Tuple[Optional[torch.dtype], int]] = {}
        # The storages of a module are handed to torch, so its tensors must come from the same ones.
        self._missed = _MANY if format == "torchscript" else 0
        # Parsing the metadata of a large checkpoint costs more than its tensors.
        self._quantization: Dict[str, Any] = {}
        self._same: Dict[int, int] = {}
        if b'"quantization"' in metadata or b'"is"' in metadata:
            self._read_metadata(json.loads(metadata))

    def tensor(self, number: int) -> torch.Tensor:
        number = self._same.get(number, number)
        built = self._tensors.get(number)
        if built is None:
            self._missed += 1
            if self._missed == _MANY:
                self._build_plain()
                return self.tensor(number)
            built = self._tensors.setdefault(number, self._build(number))
        return built

    def all(self) -> List[torch.Tensor]:
        """Every tensor in order."""
        tensors = self._tensors
        if self._missed < _MANY:
            self._missed = _MANY
            self._build_plain()
        count = self._tables.count
        if len(tensors) == count:
            return list(map(tensors.__getitem__, range(count)))
        return [self.tensor(number) for number in range(count)]

    def storage(self, number: int) -> torch.UntypedStorage:
        """A torch storage of exactly the bytes of storage `number`."""
        made = self._storages.get(number)
        if made is None:
            made = self._storages.setdefault(number, make_storage(self._tables, number))
        return made

    def name(self, number: int) -> str:
        return self._tables.names[number]

    # ---- building -------------------------------------------------------------------------------

    def _build_plain(self) -> None:
        """The tensors that alone cover their storage, which are nearly all, in one quick pass."""
        count = self._tables.count
        structs = (ctypes.c_void_p * count)()
        _ffi.check(_ffi.library().mc_model_dlpack(self._tables.memory.pointer, count, structs))
        keep, build, capsule, name = self._tensors.setdefault, _from_dlpack, _capsule, _CAPSULE_NAME
        for number, struct in enumerate(structs[:]):
            if struct is not None:
                try:
                    keep(number, build(capsule(struct, name, None)))
                except Exception:  # a type this torch does not take: built from its parts later
                    _delete_dlpack(struct)

    def _build(self, number: int) -> torch.Tensor:
        row = self._tables.rows[number]
        shape, stride = self._tables.shape_and_stride(row)
        dtype, itemsize = self._dtypes.get(row[7]) or self._dtype(row[7])
        if dtype is None:
            raise self._no_dtype(number)
        if row[2] == _ffi.MC_NO_STORAGE:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        elif not itemsize:
            tensor = self._quantized(number, dtype, shape, stride)
        else:
            tensor = torch.frombuffer(_SEED, dtype=dtype, count=1)
            tensor.set_(self.storage(row[2]), row[3] // itemsize, shape, stride)
        return _with_flags(tensor, row[8])

    def _quantized(
        self, number: int, dtype: torch.dtype, shape: Tuple[int, ...], stride: Tuple[int, ...]
    ) -> torch.Tensor:
        row = self._tables.rows[number]
        kind = self._quantization.get(str(number))
        if kind is None:
            raise _ffi.error(
                "unsupported", f"{self._model}: tensor {self.name(number)!r} has no quantizer"
            )
        bits = _ffi.library().mc_dtype_bits(row[7])
        scheme = kind.get("scheme", "")
        if scheme.startswith("per_channel"):
            floats = scheme.endswith("float_qparams")
            tensor = torch._empty_per_channel_affine_quantized(
                shape,
                scales=self._channels(kind, "scale", torch.float if floats else torch.double),
                zero_points=self._channels(
                    kind, "zero_point", torch.float if floats else torch.int64
                ),
                axis=kind["axis"],
                dtype=dtype,
            )
        else:
            tensor = torch._empty_affine_quantized(
                shape, scale=kind["scale"], zero_point=int(kind["zero_point"]), dtype=dtype
            )
        return tensor.set_(self.storage(row[2]), row[3] * 8 // bits, shape, stride)

    def _channels(self, kind: Dict[str, Any], name: str, dtype: torch.dtype) -> torch.Tensor:
        """A number for each channel: a list, or a tensor of the model."""
        node = kind.get(name, kind.get(name + "s"))
        if isinstance(node, dict):
            return self.tensor(node["t"]).to(dtype)
        return torch.tensor(node, dtype=dtype)

    # ---- element types --------------------------------------------------------------------------

    def _dtype(self, code: int) -> Tuple[Optional[torch.dtype], int]:
        """The installed torch's dtype, None when it has none; item size, 0 when quantized."""
        name = _ffi.dtype_names().get(code, "")
        dtype = getattr(torch, name, None) if name else None
        size = 0 if name in _QUANTIZED else _ffi.library().mc_dtype_bits(code) // 8
        self._dtypes[code] = (dtype, size)
        return self._dtypes[code]

    def _no_dtype(self, number: int) -> _ffi.Error:
        name = _ffi.dtype_names().get(self._tables.rows[number][7], "unknown")
        return _ffi.error(
            "unsupported",
            f"{self._model}: tensor {self.name(number)!r} has dtype {_display(name)}, which torch "
            f"{torch.__version__} does not have; Model.raw({self.name(number)!r}) gives its bytes",
        )

    def _read_metadata(self, description: Dict[str, Any]) -> None:
        from modelcache import _structure

        self._quantization = description.get("quantization", {})
        self._same = _structure.same_objects(description.get("structure"))


def _with_flags(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    if flags & _VIEW_FLAGS:
        metadata = {}
        if flags & _ffi.MC_TENSOR_CONJUGATE:
            metadata["conj"] = True
        if flags & _ffi.MC_TENSOR_NEGATIVE:
            metadata["neg"] = True
        torch._utils.set_tensor_metadata(tensor, metadata)
    requires_grad = bool(flags & _ffi.MC_TENSOR_REQUIRES_GRAD)
    if flags & _ffi.MC_TENSOR_PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _display(name: str) -> str:
    """The name with safetensors' spelling where people know a dtype by that."""
    kinds = {"float4_e2m1fn_x2": "F4", "float6_e2m3": "F6_E2M3", "float6_e3m2": "F6_E3M2"}
    return f"{name} ({kinds[name]})" if name in kinds else name
