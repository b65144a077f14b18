"""Objects as tuples of tensors, which a traced module takes and gives.

As in the original, a dataclass is its class, as an object that a tensor only holds, and a dict.
"""

import dataclasses

import torch


class ObjectTensor(torch.Tensor):
    held = None


def flattern(obj):
    for number, (kind, flatten, _) in enumerate(_KINDS):
        if kind(obj):
            return (torch.tensor([number]), *flatten(obj))
    raise TypeError(type(obj).__name__)


def unflattern(tensors):
    return _unflatten(tensors, 0)[0]


def _unflatten(tensors, start):
    return _KINDS[int(tensors[start])][2](tensors, start + 1)


def flatten_bytes(obj):
    return (torch.tensor(list(obj), dtype=torch.uint8),)


def unflatten_bytes(tensors, start):
    return bytes(tensors[start].tolist()), start + 1


def flatten_dict(obj):
    flat = [torch.tensor([len(obj)])]
    for name in sorted(obj):
        flat += [*flattern(name.encode()), *flattern(obj[name])]
    return tuple(flat)


def unflatten_dict(tensors, start):
    count, start, found = int(tensors[start]), start + 1, {}
    for _ in range(count):
        name, start = _unflatten(tensors, start)
        found[name.decode()], start = _unflatten(tensors, start)
    return found, start


def flatten_tuple(obj):
    flat = [torch.tensor([len(obj)])]
    for item in obj:
        flat += flattern(item)
    return tuple(flat)


def unflatten_tuple(tensors, start):
    count, start, found = int(tensors[start]), start + 1, []
    for _ in range(count):
        item, start = _unflatten(tensors, start)
        found.append(item)
    return tuple(found), start


def flatten_unknown(obj):
    tensor = torch.zeros(1).as_subclass(ObjectTensor)
    tensor.held = obj
    return (tensor,)


def unflatten_unknown(tensors, start):
    assert isinstance(tensors[start], ObjectTensor), "the class was lost"
    return tensors[start].held, start + 1


def flatten_dataclass(obj):
    fields = {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}
    return flatten_unknown(type(obj)) + flatten_dict(fields)


def unflatten_dataclass(tensors, start):
    kind, start = unflatten_unknown(tensors, start)
    fields, start = unflatten_dict(tensors, start)
    return kind(**fields), start


_KINDS = [
    (
        lambda obj: isinstance(obj, torch.Tensor),
        lambda obj: (obj,),
        lambda tensors, start: (tensors[start], start + 1),
    ),
    (lambda obj: isinstance(obj, bytes), flatten_bytes, unflatten_bytes),
    (lambda obj: isinstance(obj, tuple), flatten_tuple, unflatten_tuple),
    (
        dataclasses.is_dataclass,
        lambda obj: flatten_dataclass(obj),  # looked up anew, as the original does
        lambda tensors, start: unflatten_dataclass(tensors, start),
    ),
    (lambda obj: isinstance(obj, dict), flatten_dict, unflatten_dict),
]
