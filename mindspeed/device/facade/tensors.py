"""Tensor factories and types: device="cuda" means the cpu, pinned memory is plain memory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from mindspeed.device.facade.caller import is_other_library

if TYPE_CHECKING:
    from mindspeed.device.cpu import Cpu

_FACTORIES = (
    "arange as_tensor asarray empty empty_strided eye full linspace logspace normal ones rand "
    "randint randn randperm scalar_tensor tensor tril_indices triu_indices zeros"
).split()
_TENSOR_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()
_Device = torch.device  # looked up here: under that name in torch stands what the facade put there
_CPU = _Device("cpu")


def landed(device: Any) -> Any:
    """Map every spelling of a CUDA device to the cpu and leave the rest alone."""
    if isinstance(device, _Device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.partition(":")[0] == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    if isinstance(device, dict):  # of torch.load: where a file says a tensor was, and where it goes
        return {there: str(landed(here)) for there, here in device.items()}
    return device


def redirections(cpu: Cpu) -> Iterator[tuple[object, str, object]]:
    """Yield (owner, attribute, stand-in) for everything that puts a tensor on a device."""
    for name in _FACTORIES:
        yield torch, name, on_cpu(getattr(torch, name), overridable=True)
    for name in _TENSOR_METHODS:
        yield torch.Tensor, name, on_cpu(getattr(torch.Tensor, name))
    yield torch.Tensor, "record_stream", lambda tensor, stream: None
    yield torch.Tensor, "type", _cuda_type(inspect.unwrap(torch.Tensor.type))
    # Modules and other containers of tensors, tensordict's among them, read their device with it.
    yield torch._C._nn, "_parse_to", on_cpu(torch._C._nn._parse_to, position=0)
    yield torch, "set_default_device", on_cpu(torch.set_default_device, position=0)
    yield torch, "load", on_cpu(torch.load, position=1, argument="map_location")
    yield torch, "Generator", _generator(torch.Generator)
    yield torch, "device", _device(torch.device)


def on_cpu(
    original: Callable[..., Any],
    position: int | None = None,
    argument: str = "device",
    overridable: bool = False,
) -> Callable[..., Any]:
    """Wrap a function that takes a device by keyword or, where given, at a position.

    Tensor subclasses and modes get an overridable one as it stands in torch: torch itself would
    give them the original, which is not what they look up.
    """

    @functools.wraps(original)
    def placed(*args: Any, **kwargs: Any) -> Any:
        if overridable and has_torch_function_unary(args[0] if args else None):
            return handle_torch_function(placed, args[:1], *args, **kwargs)
        if argument in kwargs:
            kwargs[argument] = landed(kwargs[argument])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if position is not None and len(args) > position:
            args = (*args[:position], landed(args[position]), *args[position + 1 :])
        return original(*args, **kwargs)

    return placed


def _cuda_type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Name the tensor's type as Megatron's optimizers expect it."""
        if dtype is None:
            name: str = original(tensor)
            return name if is_other_library() else name.replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original(tensor, dtype, *args, **kwargs)

    return type


class _StandInType(type):
    """The type of a class that stands where a class of torch stood, and counts as that one.

    Instances are made by the class of torch. Tables that are looked up by type find either: which
    one they were made of depends on whether they are older than the facade.
    """

    original: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or issubclass(subclass, cls.original)

    def __eq__(cls, other: object) -> bool:
        return getattr(other, "original", other) is cls.original

    def __hash__(cls) -> int:
        return hash(cls.original)


def _stand_in(kind: type[_StandInType], original: type) -> type:
    # Where one facade stands upon another, both stand for the same class.
    original = getattr(original, "original", original)
    # Pickles name a class by the module attribute where it is found.
    names = {"original": original, "__module__": "torch", "__qualname__": original.__name__}
    return kind(original.__name__, (), names)


def _generator(original: type[torch.Generator]) -> type:
    class GeneratorType(_StandInType):
        def __call__(cls, device: Any = "cpu") -> torch.Generator:
            return original(landed(device))

    return _stand_in(GeneratorType, original)


def _device(original: type[torch.device]) -> type:
    class DeviceType(_StandInType):
        def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
            if is_other_library():
                return original(*args, **kwargs)
            if isinstance(args[0] if args else None, int):
                return _CPU
            asked = original(*args, **kwargs)
            # An index is kept, since set_device may be asked to go there.
            return original("cpu", asked.index) if asked.type == "cuda" else asked

    return _stand_in(DeviceType, original)
