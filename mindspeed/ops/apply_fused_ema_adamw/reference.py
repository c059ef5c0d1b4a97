"""The documents' call of AdamW with an average, in terms of the operator on lists."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mindspeed.ops.adamw import adamw
from mindspeed.ops.adamw.reference import AdamHyper


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
        step: (1,), which step this is, from 1 on.
        mode: 1 decays the weights apart from the gradient (AdamW), 0 adds the decay to it.
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
    adamw([var], [grad], [m], [v], hyper, averages=[s])
    return var, m, v, s


def check(
    grad: Tensor, var: Tensor, m: Tensor, v: Tensor, s: Tensor, step: Tensor, *_: Any, **__: Any
) -> None:
    """Refuse a step that is no number; adamw refuses the rest."""
    if step.numel() != 1 or step.is_floating_point():
        raise ValueError(f"step must be one whole number, got {step.numel()} of {step.dtype}")
