"""Tensor factories and types: device="cuda" means the cpu, pinned memory is plain memory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._device import _device_constructors

from mindspeed.device.facade.caller import is_other_library

if TYPE_CHECKING:
    from mindspeed.device.cpu import Cpu

_FACTORIES = (
    "arange as_tensor asarray empty empty_like empty_strided eye full full_like linspace logspace "
    "normal ones ones_like rand rand_like randint randint_like randn randn_like randperm "
    "scalar_tensor tensor tril_indices triu_indices zeros zeros_like"
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
    return device


def redirections(cpu: Cpu) -> Iterator[tuple[object, str, object]]:
    """Yield (owner, attribute, stand-in) for everything that places a tensor."""
    # `with torch.device(...)` looks its functions up by identity, in a list that is made at first
    # use and kept: it must be made of torch's own.
    _device_constructors()
    for name in _FACTORIES:
        yield torch, name, on_cpu(getattr(torch, name))
    for name in _TENSOR_METHODS:
        yield torch.Tensor, name, on_cpu(getattr(torch.Tensor, name))
    yield torch.Tensor, "record_stream", lambda tensor, stream: None
    yield torch.Tensor, "type", _cuda_type(inspect.unwrap(torch.Tensor.type))
    yield torch.nn.Module, "to", on_cpu(torch.nn.Module.to, position=1)
    yield torch, "set_default_device", on_cpu(torch.set_default_device, position=0)
    yield torch, "load", on_cpu(torch.load, position=1, argument="map_location")
    yield torch, "Generator", _generator(torch.Generator)
    yield torch, "device", _device(torch.device)


def on_cpu(
    original: Callable[..., Any], position: int | None = None, argument: str = "device"
) -> Callable[..., Any]:
    """Wrap a function that takes a device by keyword or, where given, at a position."""

    @functools.wraps(original)
    def placed(*args: Any, **kwargs: Any) -> Any:
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


def _generator(original: type[torch.Generator]) -> type:
    class GeneratorType(type):
        """Real generators stay instances of what stands at torch.Generator."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __call__(cls, device: Any = "cpu") -> torch.Generator:
            return original(landed(device))

    return GeneratorType("Generator", (), {})


def _device(original: type[torch.device]) -> type:
    class DeviceType(type):
        """Real devices stay instances of what stands at torch.device."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
            if is_other_library():
                return original(*args, **kwargs)
            if isinstance(args[0] if args else None, int):
                return _CPU
            asked = original(*args, **kwargs)
            # An index is kept, since set_device may be asked to go there.
            return original("cpu", asked.index) if asked.type == "cuda" else asked

    # Saved tensors name their device by the place where its class is found.
    return DeviceType("device", (), {"__module__": "torch", "__qualname__": "device"})
