"""One step of Adam or AdamW in plain torch, list by list."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Sequence[Tensor]


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
    ema_decay: float = 0.0
    """How much of the old average stays: average = ema_decay * average + (1 - ema_decay) * new."""

    @property
    def corrections(self) -> tuple[float, float]:
        """What the two moments are divided by, since they start at zero."""
        if not self.bias_correction:
            return 1.0, 1.0
        beta1, beta2 = self.betas
        return 1 - beta1**self.step, 1 - beta2**self.step


@torch.no_grad()
def adamw(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    hyper: AdamHyper,
    *,
    averages: Tensors = (),
    copies: Tensors = (),
    grad_scale: Tensor | None = None,
) -> None:
    """Update params, exp_avgs and exp_avg_sqs in place.

    Args:
        params: float32 (or all float64) weights; moments and averages are of the same type.
        grads: of any type, one type for all.
        averages: exponential moving averages of the params, updated after them; or none.
        copies: where the new params are written too, rounded to the copies' type; or none.
        grad_scale: a scalar on the device that the grads are multiplied by. If it is NaN, nothing
            is updated: the host need not know before the launch whether the step is skipped.
    """
    if not params or (grad_scale is not None and bool(grad_scale.isnan())):
        return
    beta1, beta2 = hyper.betas
    correction1, correction2 = hyper.corrections
    grads = [grad.to(param.dtype) for grad, param in zip(grads, params)]
    if grad_scale is not None:
        grads = torch._foreach_mul(grads, grad_scale.to(params[0].dtype))

    if hyper.weight_decay and hyper.decoupled:
        torch._foreach_mul_(params, 1 - hyper.lr * hyper.weight_decay)
    elif hyper.weight_decay:
        grads = torch._foreach_add(grads, params, alpha=hyper.weight_decay)

    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    del grads  # scaled ones are as large as the denominators

    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, math.sqrt(correction2))
    torch._foreach_add_(denominators, hyper.eps)
    torch._foreach_addcdiv_(params, exp_avgs, denominators, -hyper.lr / correction1)
    if averages:
        torch._foreach_lerp_(averages, params, 1 - hyper.ema_decay)
    if copies:
        torch._foreach_copy_(copies, params)


def check(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    hyper: AdamHyper,
    *,
    averages: Tensors = (),
    copies: Tensors = (),
    grad_scale: Tensor | None = None,
) -> None:
    """Refuse lists that do not belong together."""
    lists = {
        "grads": grads,
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
        "averages": averages,
        "copies": copies,
    }
    shapes, wide = [*map(Tensor.size, params)], {param.dtype for param in params}
    for name, tensors in lists.items():
        is_optional = name in ("averages", "copies")
        if len(tensors) != len(params) and not (is_optional and not tensors):
            raise ValueError(f"adamw got {len(params)} params and {len(tensors)} {name}")
        if tensors and [*map(Tensor.size, tensors)] != shapes:
            raise ValueError(f"adamw needs {name} of the same shapes as the params")
        if tensors and name not in ("grads", "copies") and {t.dtype for t in tensors} != wide:
            raise ValueError(f"adamw needs {name} of the type of the params")
    if wide not in ({torch.float32}, {torch.float64}):
        raise ValueError("adamw updates params of float32, or all of float64")
    if grad_scale is not None and grad_scale.dim():
        raise ValueError(f"adamw takes a scalar grad_scale, got {tuple(grad_scale.shape)}")
    if hyper.step < 1:
        raise ValueError(f"adamw counts steps from 1, got {hyper.step}")
    if not 0.0 <= hyper.ema_decay <= 1.0:
        raise ValueError(f"ema_decay must be from 0 to 1, got {hyper.ema_decay}")
