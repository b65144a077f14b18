"""The key of a Python call: the same for calls that must give the same, another for all others.

It is made of the function and its class, the arguments with defaults filled in, the environment, the
versions and torch's own defaults. The files that the call reads are no part of it: see _files.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from modelcache import _key_functions
from modelcache._key_values import Lookup, Reference, Unkeyable, Writer, digest, hidden, is_secret

__all__ = ["Call", "DoesNotFit", "Reference", "Unkeyable", "describe", "difference"]

FORMAT = 1  # of entries: a client never finds those that another format wrote

# What these give does not show how the path was spelled.
_SPELLING_BLIND = {
    "torch.serialization:load",
    "torch.jit._serialization:load",
    "safetensors.torch:load_file",
}
# These turn a path into its text before anything else, and look at no folder but that of a path.
_LIBRARIES = {
    "diffusers",
    "open_clip",
    "peft",
    "safetensors",
    "sentence_transformers",
    "torch",
    "torchvision",
    "transformers",
}
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "HOME", "XDG_CACHE_HOME", "USE_TORCH")
_VARIABLE_GROUPS = (
    "ACCELERATE_",
    "BNB_",
    "DIFFUSERS_",
    "HF_",
    "HUGGINGFACE_",
    "PYTORCH_",
    "SAFETENSORS_",
    "SENTENCE_TRANSFORMERS_",
    "TORCH_",
    "TRANSFORMERS_",
)
_TALK = ("PROGRESS", "VERBOSITY", "TELEMETRY", "WARNING", "_LOGS", "_LOG_")  # of no effect on a result


class DoesNotFit(TypeError):
    """The function does not take such arguments."""


class Call(NamedTuple):
    """A call that can be cached."""

    key: str  # 32 hexadecimal digits
    function: str  # "transformers.models.llama.modeling_llama:LlamaForCausalLM.from_pretrained"
    parts: Dict[str, str]  # what the key is made of; secrets are hidden
    references: Dict[str, Reference]  # arguments that came out of the cache, by name


def describe(
    function: Callable[..., Any],
    args: Tuple[Any, ...],
    kwargs: Mapping[str, Any],
    lookup: Optional[Lookup] = None,
) -> Call:
    """The key of a call. Raises Unkeyable, which names the argument, and DoesNotFit for arguments that
    the function does not take."""
    while isinstance(function, functools.partial):
        args = (*function.args, *args)
        kwargs = {**function.keywords, **kwargs}
        function = function.func
    shown, text, known = _function(function)
    package = known.partition(".")[0]
    paths = "type"
    if package in _LIBRARIES:
        paths = "same" if text in _SPELLING_BLIND else "text"
    writer = Writer(lookup, paths)
    parts = {"format": str(FORMAT)}
    parts["function"] = text or _unnamed(function, writer)
    for name, value in _arguments(function, args, kwargs):
        where = f"argument {name}"
        parts[where] = hidden(value) if is_secret(name) else writer.short(value, where)
    if writer.relative or package not in _LIBRARIES:
        parts["folder"] = os.getcwd()
    parts.update(_surroundings(package))
    key = digest("\n".join([f"{name}\t{value}" for name, value in parts.items()]))
    return Call(key, shown, parts, writer.references)


def difference(old: Mapping[str, str], new: Mapping[str, str]) -> List[str]:
    """In which parts two calls differ, in words."""
    result = []
    for name in sorted({*old, *new}, key=lambda name: (name not in new, name)):
        before, after = old.get(name), new.get(name)
        if before != after:
            result.append(f"{name} is {after or 'not there'}, was {before or 'not there'}")
    return result


# ---- the function -------------------------------------------------------------------------------


def _function(function: Callable[..., Any]) -> Tuple[str, str, str]:
    """How it is shown, its text (empty when only its content says what it is), and its module."""
    if isinstance(function, types.MethodType) and isinstance(function.__self__, type):
        owner, method = function.__self__, function.__func__
        if not _key_functions.importable(owner):
            return f"{_name(owner)}.{method.__name__}", "", owner.__module__
        text = f"{_name(method)}{_key_functions.code_of_user(method)} of {_name(owner)}"
        return f"{_name(owner)}.{method.__name__}", text, method.__module__
    if isinstance(function, types.FunctionType):
        if not _key_functions.importable(function):
            return _name(function), "", function.__module__ or ""
        text = _name(function) + _key_functions.code_of_user(function)
        return _name(function), text, function.__module__
    if isinstance(function, type):
        importable = _key_functions.importable(function)
        return _name(function), _name(function) if importable else "", function.__module__
    if isinstance(function, types.BuiltinFunctionType) and isinstance(
        function.__self__, (types.ModuleType, type(None))
    ):
        return _name(function), _name(function), function.__module__ or ""
    if isinstance(function, types.MethodType):
        return _name(function), "", function.__func__.__module__ or ""
    return _name(type(function)), "", type(function).__module__


def _name(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}"


def _unnamed(function: Any, writer: Writer) -> str:
    if isinstance(function, types.MethodType):  # of an instance, or of a class of the script
        method = writer.function(function.__func__, "the function")
        return f"{method} of {writer.text(function.__self__, 'the object of the method')}"
    return writer.text(function, "the function")


# ---- the arguments ------------------------------------------------------------------------------


_signatures: Dict[int, Tuple[Any, Any]] = {}  # by id, with the function, which keeps the id its own


def _signature(function: Any) -> Optional[inspect.Signature]:
    plain = isinstance(function, types.FunctionType)
    target = function if plain else getattr(function, "__func__", None)
    if target is None or not isinstance(target, types.FunctionType):
        return _inspected(function)
    known = _signatures.get(id(target))
    if known is None or known[0] is not target:
        if len(_signatures) > 1000:  # functions made in a loop
            _signatures.clear()
        known = _signatures[id(target)] = (target, _inspected(target))
    return known[1]


def _inspected(function: Any) -> Optional[inspect.Signature]:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # builtins that say nothing
        return None


def _arguments(
    function: Any, args: Tuple[Any, ...], kwargs: Mapping[str, Any]
) -> List[Tuple[str, Any]]:
    """Names and values, in an order that does not depend on how the call was written."""
    signature = _signature(function)
    if signature is None:
        return [*((str(n), value) for n, value in enumerate(args)), *sorted(kwargs.items())]
    bound = _bind(signature, function, args, kwargs)
    result: List[Tuple[str, Any]] = []
    own = next(iter(signature.parameters), "") if isinstance(function, types.MethodType) else ""
    for name, parameter in signature.parameters.items():
        if name == own:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            result += sorted(bound.get(name, {}).items())
        elif parameter.kind is parameter.VAR_POSITIONAL:
            result += [(f"{name}[{n}]", item) for n, item in enumerate(bound.get(name, ()))]
        elif name in bound:
            result.append((name, bound[name]))
        elif parameter.default is not parameter.empty:
            result.append((name, parameter.default))
    return result


def _bind(
    signature: inspect.Signature, function: Any, args: Tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Dict[str, Any]:
    of_method = isinstance(function, types.MethodType) and isinstance(
        function.__func__, types.FunctionType
    )
    try:
        if not of_method:
            return signature.bind(*args, **kwargs).arguments
        bound = signature.bind(function.__self__, *args, **kwargs).arguments
    except TypeError as failure:
        raise DoesNotFit(str(failure)) from None
    bound.pop(next(iter(bound)))
    return bound


# ---- what else a result depends on --------------------------------------------------------------


_interpreter: Dict[str, str] = {}


def _surroundings(package: str) -> Dict[str, str]:
    if not _interpreter:
        flags = sys.flags
        _interpreter["interpreter"] = f"{sys.executable} {sys.prefix}"
        _interpreter["version of python"] = f"{sys.implementation.name} {sys.version}"
        _interpreter["flags"] = f"optimize={flags.optimize} utf8={flags.utf8_mode}"
    parts = dict(_interpreter)
    for name in sorted({package, "torch"}):
        module = sys.modules.get(name)
        if module is not None and name not in ("__main__", "builtins"):
            version, file = getattr(module, "__version__", ""), getattr(module, "__file__", "")
            parts[f"version of {name}"] = f"{version} in {file}"
    parts.update(_variables())
    parts.update(_torch_state())
    return parts


def _variables() -> Dict[str, str]:
    found = {}
    for name, value in os.environ.items():
        if name.startswith(_VARIABLE_GROUPS) or name in _VARIABLES:
            if not any(word in name for word in _TALK):
                found[f"environment {name}"] = hidden(value) if is_secret(name) else value
    return {name: found[name] for name in sorted(found)}


def _torch_state() -> Dict[str, str]:
    """torch's defaults of this thread. Raises Unkeyable while something else watches its calls."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return {"default dtype": "torch.float32", "default device": "cpu", "grad": "True"}
    if torch._C._len_torch_dispatch_stack():
        raise Unkeyable("", "a mode of torch watches what the call does")
    device = "cpu"
    if torch._C._len_torch_function_stack():
        device = _device_of_modes()
    if torch.is_inference_mode_enabled():
        raise Unkeyable("", "tensors that are made in inference mode do not travel")
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": device,
        "grad": str(torch.is_grad_enabled()),
    }


def _device_of_modes() -> str:
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    device = "cpu"
    for mode in _get_current_function_mode_stack():
        if not isinstance(mode, DeviceContext):
            raise Unkeyable("", f"a mode of torch, {type(mode).__qualname__}, watches what the call does")
        device = str(mode.device)
    return device
