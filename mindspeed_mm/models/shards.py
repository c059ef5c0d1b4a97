"""Put whole tensors into parameters that may be sharded, and have parameters without memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import mindspeed.device
from mindspeed.checkpoint.file_io import aligned


def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy this rank's part of whole values into a parameter, sharded or not."""
    with torch.no_grad():
        if not isinstance(target, DTensor):
            target.detach().copy_(aligned(values))
            return
        shape, offset = compute_local_shape_and_global_offset(
            target.shape, target.device_mesh, target.placements
        )
        box = tuple(slice(start, start + size) for start, size in zip(offset, shape))
        target.detach().to_local().copy_(aligned(values[box]))


def own_experts(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """Return the rows of the experts that this rank has, if the ranks share those of a module."""
    rank, size = getattr(module, "expert_shard", (0, 1))
    return values.chunk(size)[rank] if size > 1 else values


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Build models whose parameters take no memory; buffers, which may be computed, are real."""
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            with torch.device("meta"):
                empty = torch.empty_like(param, device="meta")
            attributes = {**vars(param), "requires_grad": param.requires_grad}
            param = _with(type(param)(empty, requires_grad=False), attributes)
        plain(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        with torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def give_memory(model: nn.Module, device: torch.device | None, offload: bool) -> None:
    """Give parameters on meta memory and bring all else to the device; ties stay.

    Without a device: the current one; with `offload`, shards stay in host memory.
    """
    tied = _tied(model)
    here = mindspeed.device.current().torch_device
    shards = device or (torch.device("cpu") if offload else here)

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            place = shards if isinstance(tensor, DTensor) else device or here
            return torch.empty_like(tensor, device=place)
        return tensor if isinstance(tensor, DTensor) else tensor.to(device or here)

    model._apply(real)
    for (module, name), *others in tied:
        for other, key in others:
            other._parameters[key] = module._parameters[name]


def same_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return for every name the names of the same tensor, its own among them."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {name: names[id(tensor)] for name, tensor in tensors.items()}


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of every parameter that has several."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def _with(parameter: nn.Parameter, attributes: dict[str, Any]) -> nn.Parameter:
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter
