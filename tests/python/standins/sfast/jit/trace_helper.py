"""A module whose forward is traced when it is first called, behind a lock."""

import functools
import threading

import torch
from sfast.jit.utils import better_trace
from sfast.utils import flat_tensors


class TraceablePosArgOnlyModuleWrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *flat):
        arguments, named = flat_tensors.unflattern(flat)
        return flat_tensors.flattern(self.module(*arguments, **named))


class TracedPosArgOnlyModuleWrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *arguments, **named):
        return flat_tensors.unflattern(self.module(*flat_tensors.flattern((arguments, named))))


def lazy_trace(module):
    lock = threading.Lock()
    traced = {}
    wrapped = module.forward

    @functools.wraps(wrapped)
    def wrapper(*arguments, **named):
        key = len(arguments), tuple(named)
        with lock:
            if key not in traced:
                flat = flat_tensors.flattern((arguments, named))
                holder = TraceablePosArgOnlyModuleWrapper(_Plain(wrapped))
                traced[key] = TracedPosArgOnlyModuleWrapper(better_trace(holder, flat))
        return traced[key](*arguments, **named)

    wrapper._cached = traced
    return wrapper


class _Plain(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.owner = function.__self__
        self.function = function

    def forward(self, *arguments, **named):
        return self.function(*arguments, **named)
