"""One step of Adam or AdamW in plain torch, with foreach operators on lists of tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops import adamw as ops
from mindspeed.ops.adamw import halves

Tensors = tuple[Tensor, ...] | list[Tensor]


@dataclass(frozen=True, kw_only=True)
class AdamHyper:
    """The hyperparameters of one Adam step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    """The number of this step, from 1 on."""
    decoupled: bool = True
    """AdamW: decay the weights directly, instead of adding the decay to the gradient."""
    bias_correction: bool = True
    ema_decay: float = 0.0
    """average = ema_decay * average + (1 - ema_decay) * param."""

    @property
    def corrections(self) -> tuple[float, float]:
        """The bias corrections, by which the two moments are divided."""
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
    remainders: Tensors = (),
    grad_scale: Tensor | None = None,
) -> None:
    """Update params, exp_avgs and exp_avg_sqs in place.

    Args:
        params: float32 (or all float64) weights; moments and averages have the same dtype. With
            `remainders`, bfloat16 weights beside float32 moments.
        grads: of any dtype, the same for all.
        averages: exponential moving averages of the params, updated after them; or none.
        copies: tensors the new params are also written to, rounded to their dtype; or none.
        remainders: int16, the rest of float32 weights whose halves are the params (see `halves`),
            marks in the sign bits of exp_avg_sqs; or none. Not with averages or copies.
        grad_scale: a scalar on the device that the grads are multiplied by. If it is NaN, nothing
            is updated: the host need not read the scale to decide whether to skip the step.
    """
    if not params or (grad_scale is not None and bool(grad_scale.isnan())):
        return
    if remainders:
        for one in zip(params, grads, exp_avgs, exp_avg_sqs, remainders):
            _update_halves(*one, hyper=hyper, grad_scale=grad_scale)
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
    del grads  # scaled gradients take as much memory as the denominators

    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, math.sqrt(correction2))
    torch._foreach_add_(denominators, hyper.eps)
    torch._foreach_addcdiv_(params, exp_avgs, denominators, -hyper.lr / correction1)
    if averages:
        torch._foreach_lerp_(averages, params, 1 - hyper.ema_decay)
    if copies:
        torch._foreach_copy_(copies, params)


def _update_halves(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    remainder: Tensor,
    *,
    hyper: AdamHyper,
    grad_scale: Tensor | None,
) -> None:
    """Update one weight: the float32 weights of all would cost what their halves save."""
    weight = halves.join_weight(param, remainder, halves.marks_of(exp_avg_sq))
    exp_avg_sq.copy_(halves.without_marks(exp_avg_sq))
    adamw([weight], [grad], [exp_avg], [exp_avg_sq], hyper, grad_scale=grad_scale)
    high, low, is_above = halves.split_weight(weight)
    param.copy_(high)
    remainder.copy_(low)
    halves.set_marks(exp_avg_sq, is_above)


def apply_fused_ema_adamw(
    grad: Tensor,
    var: Tensor,
    m: Tensor,
    v: Tensor,
    s: Tensor,
    step: Tensor,
    lr: float = 1e-3,
    ema_decay: float = 0.9999,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    mode: int = 1,
    bias_correction: bool = True,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Update var, its moments m and v and its average s in place, and return them.

    Args:
        step: (1,), the number of this step, from 1 on.
        mode: 1 decays the weights directly (AdamW), 0 adds the decay to the gradient.
    """
    if mode not in (0, 1):
        raise ValueError(f"mode must be 0 (L2) or 1 (AdamW), got {mode}")
    hyper = AdamHyper(
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        step=int(step),
        decoupled=mode == 1,
        bias_correction=bias_correction,
        ema_decay=ema_decay,
    )
    ops.adamw([var], [grad], [m], [v], hyper, averages=[s])
    return var, m, v, s


def check(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    hyper: AdamHyper,
    *,
    averages: Tensors = (),
    copies: Tensors = (),
    remainders: Tensors = (),
    grad_scale: Tensor | None = None,
) -> None:
    """Raise ValueError for lists that do not match."""
    lists = {
        "grads": grads,
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
        "averages": averages,
        "copies": copies,
        "remainders": remainders,
    }
    shapes, dtypes = [*map(Tensor.size, params)], {param.dtype for param in params}
    if remainders:
        if dtypes != {torch.bfloat16} or {t.dtype for t in remainders} != {torch.int16}:
            raise ValueError("adamw takes int16 remainders of params of bfloat16")
        if averages or copies:
            raise ValueError("adamw with remainders keeps neither averages nor copies")
        dtypes = {torch.float32}
    for name, tensors in lists.items():
        is_optional = name in ("averages", "copies", "remainders")
        if len(tensors) != len(params) and not (is_optional and not tensors):
            raise ValueError(f"adamw got {len(params)} params and {len(tensors)} {name}")
        if tensors and [*map(Tensor.size, tensors)] != shapes:
            raise ValueError(f"adamw needs {name} of the same shapes as the params")
        is_any_dtype = name in ("grads", "copies", "remainders")
        if tensors and not is_any_dtype and {t.dtype for t in tensors} != dtypes:
            raise ValueError(f"adamw needs {name} of the dtype of the params")
    if dtypes not in ({torch.float32}, {torch.float64}):
        raise ValueError("adamw updates params of float32, or all of float64")
    if grad_scale is not None and grad_scale.dim():
        raise ValueError(f"adamw takes a scalar grad_scale, got {tuple(grad_scale.shape)}")
    if hyper.step < 1:
        raise ValueError(f"adamw counts steps from 1, got {hyper.step}")
    if not 0.0 <= hyper.ema_decay <= 1.0:
        raise ValueError(f"ema_decay must be from 0 to 1, got {hyper.ema_decay}")


def check_apply_fused_ema_adamw(
    grad: Tensor, var: Tensor, m: Tensor, v: Tensor, s: Tensor, step: Tensor, *_: Any, **__: Any
) -> None:
    """Raise ValueError unless step is one integer; adamw checks the rest."""
    if step.numel() != 1 or step.is_floating_point():
        raise ValueError(f"step must be one integer, got {step.numel()} of {step.dtype}")
