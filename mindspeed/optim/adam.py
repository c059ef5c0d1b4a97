"""Adam and AdamW on lists of tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AdamHyper:
    """The numbers of one Adam step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    """Which step this is, from 1 on."""
    decoupled: bool = True
    """AdamW: decay the weights apart from the gradient, instead of adding the decay to it."""
    bias_correction: bool = True


@torch.no_grad()
def adam_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    hyper: AdamHyper,
) -> None:
    """Update params, exp_avgs and exp_avg_sqs in place; all lists share one dtype."""
    if not params:
        return
    beta1, beta2 = hyper.betas
    correction1 = correction2 = 1.0
    if hyper.bias_correction:
        correction1, correction2 = 1 - beta1**hyper.step, 1 - beta2**hyper.step

    if hyper.weight_decay and hyper.decoupled:
        torch._foreach_mul_(params, 1 - hyper.lr * hyper.weight_decay)
    elif hyper.weight_decay:
        grads = torch._foreach_add(grads, params, alpha=hyper.weight_decay)

    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)

    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, math.sqrt(correction2))
    torch._foreach_add_(denominators, hyper.eps)
    torch._foreach_addcdiv_(params, exp_avgs, denominators, -hyper.lr / correction1)
