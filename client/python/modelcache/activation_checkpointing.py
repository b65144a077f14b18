"""Which activations to save within a memory budget: an exact knapsack for PyTorch.

    import modelcache.activation_checkpointing as mac
    torch._functorch.config.activation_memory_budget = 0.5
    torch._functorch.config.activation_memory_budget_solver = mac.solver()

The answer is the best one there is, never over the budget, and the same on every machine.
`knapsack` and `dp_knapsack_sliding_hirschberg` have the signature of PyTorch's own solvers:

    runtime, saved, recomputable = mac.knapsack([0.3, 0.2, 0.1], [5.0, 1.0, 1.0], 0.4)

Nothing imports torch before `solver` is called. No daemon is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
from array import array
from itertools import compress
from typing import Any, Iterator, List, Optional, Sequence, Tuple

from modelcache import _ffi
from modelcache._errors import InvalidArgumentError, UnsupportedError

Plan = Tuple[float, List[int], List[int]]

QUANTUM = 1e-4  # what PyTorch's solvers count in
_FLIP = bytes([1, 0]) + bytes(254)
# Equal results are within this of each other when PyTorch computes a fraction of bytes.
_FRACTION_ERROR = 1e-9


def knapsack(memory: Sequence[float], runtimes: Sequence[float], max_memory: float) -> Plan:
    """The runtime saved, the indices to save and those to recompute, both rising.

    Exact: no quanta. Memory that is written in decimal fractions adds up as written (0.1 and 0.2
    fit into 0.3). Items of no runtime are recomputed, items of no memory saved.
    Raises InvalidArgumentError, a ValueError, which names list and index.
    """
    return _plan(memory, runtimes, max_memory, quantum=0.0)


def dp_knapsack_sliding_hirschberg(
    memory: Sequence[float], runtimes: Sequence[float], max_memory: float
) -> Plan:
    """As PyTorch's function of this name, in the same quanta of 1/10,000, but never over the budget.

    Memory is rounded up to whole quanta and the budget down, so that no item is free; `knapsack`
    does without the rounding. Results and errors as there.
    """
    return _plan(memory, runtimes, max_memory, quantum=QUANTUM)


def solver(*, slack: float = 0.0, work_limit: int = 0) -> Any:
    """An instance for torch._functorch.config.activation_memory_budget_solver.

    Weights are the bytes of the activations, recovered exactly from PyTorch's fractions; runtimes
    are what torch._functorch.partitioners.estimate_runtime says. `slack` is the part by which a
    plan may exceed the budget: PyTorch's dp overruns by up to 0.005. `work_limit` ends the search
    for instances of a kind not seen in practice, deterministically; 0 means about two seconds.
    The budget holds for the sum of the saved bytes, as with PyTorch's solvers; the peak of the
    backward pass is more than that.
    Raises UnsupportedError where torch is missing or has no CustomKnapsackSolver.
    """
    if not (isinstance(slack, (int, float)) and 0 <= slack < math.inf):
        raise InvalidArgumentError("slack must be a number of 0 or more", status="invalid_argument")
    if not (isinstance(work_limit, int) and 0 <= work_limit < 1 << 64):
        raise InvalidArgumentError("work_limit must be a whole number of 0 or more", status="invalid_argument")
    return _solver_class()(float(slack), work_limit)


def _solve(problem: _ffi.Knapsack, count: int) -> Tuple[List[int], List[int]]:
    problem.struct_size = ctypes.sizeof(problem)
    problem.count = count
    taken = bytearray(max(count, 1))
    target = (ctypes.c_uint8 * len(taken)).from_buffer(taken)
    _ffi.check(_ffi.library().mc_knapsack_solve(ctypes.byref(problem), target, None))
    del target
    saved = list(compress(range(count), taken))
    return saved, list(compress(range(count), taken.translate(_FLIP)))


def _doubles(name: str, numbers: Sequence[float]) -> array:
    try:
        return array("d", numbers)
    except TypeError:
        pass
    for index, number in enumerate(numbers):  # tensors of one element, and what is no number
        try:
            float(number)
        except (TypeError, ValueError):
            raise InvalidArgumentError(
                f"{name}[{index}] is no number: {number!r}", status="invalid_argument"
            ) from None
    return array("d", [float(number) for number in numbers])


def _plan(
    memory: Sequence[float], runtimes: Sequence[float], max_memory: float, quantum: float
) -> Plan:
    weights, values = _doubles("memory", memory), _doubles("runtimes", runtimes)
    if len(weights) != len(values):
        raise InvalidArgumentError(
            f"memory has {len(weights)} items, runtimes {len(values)}", status="invalid_argument"
        )
    problem = _ffi.Knapsack(
        real_weights=weights.buffer_info()[0],
        values=values.buffer_info()[0],
        real_capacity=max_memory,
        quantum=quantum,
    )
    try:
        saved, recomputable = _solve(problem, len(weights))
    except InvalidArgumentError as failure:
        raise _in_our_words(failure) from None
    return math.fsum(values[index] for index in saved), saved, recomputable


def _in_our_words(failure: InvalidArgumentError) -> InvalidArgumentError:
    """The same error with the names that PyTorch's functions give their arguments."""
    text = str(failure).replace("weights[", "memory[").replace("values[", "runtimes[")
    text = text.replace("the capacity", "max_memory")
    return InvalidArgumentError(text, failure.code, failure.status)


# ---- PyTorch's interface -------------------------------------------------------------------------


@contextlib.contextmanager
def _as_outside() -> Iterator[None]:
    """Undoes PyTorch's no_dispatch(), under which it calls a solver and FlopCounterMode sees nothing."""
    import torch

    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


def _runtimes(nodes: Sequence[Any]) -> List[float]:
    from torch._functorch.partitioners import estimate_runtime

    with _as_outside():
        return [float(estimate_runtime(node)) for node in nodes]


def _bytes(memory: Sequence[float], nodes: Sequence[Any]) -> Optional[Tuple[List[int], int]]:
    """The sizes behind the fractions, and what 1.0 is in bytes; None where they do not agree."""
    from torch._functorch.partitioners import _size_of

    sizes = [int(_size_of(node)) for node in nodes]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    if not (memory[largest] > 0 and sizes[largest] > 0):
        return None
    whole = round(sizes[largest] / memory[largest])
    if whole < 1:
        return None
    for size, fraction in zip(sizes, memory):
        if abs(size - fraction * whole) > _FRACTION_ERROR * max(size, 1):
            return None
    return sizes, whole


def _library_bytes() -> bytes:
    """The loaded library's file. A bare name was found by the dynamic linker: the map knows where."""
    path = _ffi.library()._name
    if os.sep not in path:
        with open("/proc/self/maps", "rb") as maps:
            lines = [line.split(maxsplit=5)[-1].strip() for line in maps if b"libmodelcache.so" in line]
        path = os.fsdecode(lines[0])
    with open(path, "rb") as file:
        return file.read()


def _fingerprint() -> bytes:
    digest = hashlib.sha256(_library_bytes())
    for source in (__file__, _ffi.__file__):
        with open(source, "rb") as file:
            digest.update(hashlib.sha256(file.read()).digest())
    return digest.digest()


_class: Optional[type] = None


def _solver_class() -> type:
    global _class
    if _class is None:
        _class = _make_class()
    return _class


def _make_class() -> type:
    try:
        import torch
    except ImportError as failure:
        raise UnsupportedError(
            f"the solver for PyTorch needs torch: {failure}", status="unsupported"
        ) from failure
    try:
        from torch._functorch.partitioners import CustomKnapsackSolver, _size_of, estimate_runtime
    except ImportError as failure:
        raise UnsupportedError(
            f"torch {torch.__version__} has no CustomKnapsackSolver, or not the functions beside it"
            f" ({failure}); 2.13 has",
            status="unsupported",
        ) from failure

    class Solver(CustomKnapsackSolver):  # type: ignore[misc, valid-type]
        """The exact knapsack over bytes; see modelcache.activation_checkpointing.solver."""

        def __init__(self, slack: float, work_limit: int) -> None:
            self.slack, self.work_limit = slack, work_limit
            self.calls = 0
            self._uuid = hashlib.sha256(_fingerprint() + repr((slack, work_limit)).encode()).digest()

        def __call__(
            self,
            memory: List[float],
            joint_graph: Any,
            max_memory: float,
            node_info: Any,
            all_recomputable_banned_nodes: List[Any],
        ) -> Tuple[List[int], List[int]]:
            nodes = list(all_recomputable_banned_nodes)
            self.calls += 1
            if len(memory) != len(nodes):
                raise InvalidArgumentError(
                    f"PyTorch passed {len(memory)} sizes for {len(nodes)} nodes",
                    status="invalid_argument",
                )
            return self.plan(memory, _runtimes(nodes), max_memory, _bytes(memory, nodes) if nodes else None)

        def plan(
            self,
            memory: Sequence[float],
            runtimes: Sequence[float],
            max_memory: float,
            sizes: Optional[Tuple[List[int], int]] = None,
        ) -> Tuple[List[int], List[int]]:
            """As __call__, for runtimes and sizes that are known already."""
            capacity = max_memory * (1 + self.slack)
            values = _doubles("runtimes", runtimes)
            problem = _ffi.Knapsack(work_limit=self.work_limit, values=values.buffer_info()[0])
            if sizes is None:
                weights = _doubles("memory", memory)
                problem.real_weights, problem.real_capacity = weights.buffer_info()[0], capacity
            else:
                weights = array("Q", sizes[0])
                problem.weights, problem.capacity = weights.buffer_info()[0], int(capacity * sizes[1])
            try:
                return _solve(problem, len(values))
            except InvalidArgumentError as failure:
                raise _in_our_words(failure) from None

        def uuid(self) -> bytes:
            return self._uuid

        def __reduce__(self) -> Any:
            return _restore, (self.slack, self.work_limit)

    Solver.__qualname__ = "Solver"
    return Solver


def _restore(slack: float, work_limit: int) -> Any:
    return solver(slack=slack, work_limit=work_limit)


__all__ = ["dp_knapsack_sliding_hirschberg", "knapsack", "solver"]
