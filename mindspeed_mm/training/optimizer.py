"""The optimizer of a sharded model."""

from typing import Any

import torch
from torch import nn

from mindspeed.config import ConfigError
from mindspeed_llm.training.options import RunOptions


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
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=options.adam_eps, fused=is_fused)


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
