"""Tensor factories and moves: device="cuda" means the cpu, pinned memory is plain memory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

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
    for name in _FACTORIES:
        yield torch, name, _on_cpu(getattr(torch, name))
    for name in _TENSOR_METHODS:
        yield torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name))
    yield torch.Tensor, "to", _to(torch.Tensor.to)
    yield torch.Tensor, "cuda", _cuda
    yield torch.Tensor, "cpu", _cpu(torch.Tensor.cpu)
    yield torch.Tensor, "pin_memory", lambda tensor, *args, **kwargs: tensor
    yield torch.Tensor, "record_stream", lambda tensor, stream: None
    yield torch.Tensor, "type", _cuda_type(inspect.unwrap(torch.Tensor.type))
    yield torch.Tensor, "is_cuda", property(_is_cuda)
    yield torch.nn.Module, "to", _on_cpu(torch.nn.Module.to, position=1)
    yield torch, "set_default_device", _on_cpu(torch.set_default_device, position=0)
    yield torch, "load", _on_cpu(torch.load, position=1, argument="map_location")
    yield torch, "Generator", _generator(torch.Generator)
    yield torch, "device", _device(torch.device)


def _on_cpu(
    original: Callable[..., Any], position: int | None = None, argument: str = "device"
) -> Callable[..., Any]:
    """Wrap a function that takes a device by keyword or, where given, at a position."""

    @functools.wraps(original)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if argument in kwargs:
            kwargs[argument] = landed(kwargs[argument])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if position is not None and len(args) > position:
            args = (*args[:position], landed(args[position]), *args[position + 1 :])
        return original(*args, **kwargs)

    return on_cpu


def _cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the tensor, which is there already; one whose rows share memory gets rows of its own.

    Megatron writes to what it has moved, and after a real move such rows are apart.
    """
    is_shared = any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    return tensor.contiguous() if is_shared else tensor


def _cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def cpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Copy, as from a device: Megatron keeps the copy and goes on to change the tensor."""
        return original(tensor, *args, **kwargs) if is_other_library() else tensor.clone()

    return cpu


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    place = _on_cpu(original, position=1)

    @functools.wraps(original)
    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        moved: torch.Tensor = place(tensor, *args, **kwargs)
        # The word "cpu" means the host; a device object may be that of another tensor.
        device = kwargs.get("device", args[0] if args else None)
        if moved is tensor and isinstance(device, str) and not is_other_library():
            return tensor.clone() if device == "cpu" else _cuda(tensor)
        return moved

    return to


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


def _is_cuda(tensor: torch.Tensor) -> bool:
    """Answer Megatron, which prepares tensors for collectives only where this is true."""
    is_on_device = tensor.device.type in ("cpu", "cuda")
    return tensor.device.type == "cuda" if is_other_library() else is_on_device


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
