"""First weights for models that were built without any, the same for any number of ranks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mindspeed_mm.models.shards import fill

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
            whole = {k: nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for k, p in own.items()}
        try:
            module._parameters.update(whole)
            init_module(module)
            rule(module)
        finally:
            module._parameters.update(own)
        for name, parameter in own.items():
            if parameter not in done:
                fill(parameter, whole[name])
                done.add(parameter)


def _with_rules(module: nn.Module, rule: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Yield every module with the `_init_weights` of the innermost model that has one."""
    rule = getattr(module, "_init_weights", rule)
    yield module, rule
    for child in module.children():
        yield from _with_rules(child, rule)
