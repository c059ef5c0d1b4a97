"""The optimizer of a sharded model."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed.config import ConfigError
from mindspeed.training.options import RunOptions


class ShardedAdamW(torch.optim.AdamW):
    """AdamW on this rank's shards themselves: a DTensor is unpacked again for every operation."""

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        found = super()._init_group(group, *lists)
        for tensors in lists:
            if isinstance(tensors, list):
                tensors[:] = local_shards(tensors)
        return found


def local_shards(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's shards themselves, not copies or views."""
    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]


def make_optimizer(model: nn.Module, options: RunOptions) -> torch.optim.Optimizer:
    """Return AdamW or SGD over what is trained; biases and norms do not decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError("nothing is trained: every parameter of the model is frozen")
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim > 1], "wd_mult": 1.0},
        {"params": [p for p in trained if p.ndim <= 1], "wd_mult": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # The schedule sets the rate and the decay of every group before each step.
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=options.sgd_momentum)
    is_fused = all(p.device.type != "cpu" for p in trained)
    betas = (options.adam_beta1, options.adam_beta2)
    return ShardedAdamW(groups, lr=0.0, betas=betas, eps=options.adam_eps, fused=is_fused)


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its state, which it else does in its first step; no weight changes."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
