"""First weights for models that were built without any, the same for any number of ranks."""

import math
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn

from mindspeed_mm.models.shards import fill, own_experts

NORMAL = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.Embedding,
)


def init_module(module: nn.Module, std: float = 0.02) -> None:
    """Fill a module's own parameters: weights around zero, biases zero, norms one."""
    is_norm = not isinstance(module, NORMAL) and "norm" in type(module).__name__.lower()
    for name, parameter in module.named_parameters(recurse=False):
        if "bias" in name:
            nn.init.zeros_(parameter)
        elif is_norm:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=std)
    padding = getattr(module, "padding_idx", None)
    if isinstance(module, nn.Embedding) and padding is not None:
        with torch.no_grad():
            module.weight[padding].zero_()


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Fill every parameter by the `_init_weights` of the model around it, else by `init_module`.

    Every rank makes each module whole, one at a time, and keeps its part: as all ranks draw the
    same numbers, seed them equally.
    """
    done: set[torch.Tensor] = set()
    for module, rule in _with_rules(model, init_module):
        own = {name: p for name, p in module._parameters.items() if p is not None}
        if not own or all(p in done for p in own.values()):
            continue
        with torch.device("cpu"):
            whole = {name: nn.Parameter(_whole_like(p, module)) for name, p in own.items()}
        try:
            module._parameters.update(whole)
            init_module(module)
            rule(module)
        finally:
            module._parameters.update(own)
        for name, parameter in own.items():
            if parameter not in done:
                fill(parameter, own_experts(module, whole[name]))
                done.add(parameter)
    initialize_adapters(model)


@torch.no_grad()
def initialize_adapters(model: nn.Module, names: Container[str] | None = None) -> None:
    """Fill low-rank adapters as peft does: what they add is zero at first."""
    for name, parameter in model.named_parameters():
        if names is not None and name not in names:
            continue
        if ".lora_A." in name:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            fill(parameter, nn.init.kaiming_uniform_(whole, a=math.sqrt(5)))
        elif ".lora_B." in name:
            parameter.zero_()


def _whole_like(parameter: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Return memory for a parameter as it is without sharding, with the experts of all ranks."""
    _, ranks = getattr(module, "expert_shard", (0, 1))
    shape = (parameter.shape[0] * ranks, *parameter.shape[1:]) if ranks > 1 else parameter.shape
    return torch.empty(shape, dtype=parameter.dtype)


def _with_rules(module: nn.Module, rule: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Yield every module with the `_init_weights` of the innermost model that has one."""
    rule = getattr(module, "_init_weights", rule)
    yield module, rule
    for child in module.children():
        yield from _with_rules(child, rule)
