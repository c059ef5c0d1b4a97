"""The optimizers that `--optimizer-selection` names instead of the one Megatron imported."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops.adamw.reference import AdamHyper
from mindspeed.te.pytorch.optimizers.fused_adam import FusedAdam
from mindspeed.te.pytorch.optimizers.fused_ema_adam import FusedEmaAdam


def select_adam(original: type, selection: str, ema_decay: float) -> type:
    """Return the class that Megatron's `get_megatron_optimizer` shall build as Adam."""
    if selection == "fused_torch_adamw":
        return TorchFusedAdam
    if selection == "fused_ema_adamw":
        return _with_decay(ema_decay)
    return original


@functools.cache
def _with_decay(ema_decay: float) -> type:
    # A class, as Megatron tests for one.
    def build(self: FusedEmaAdam, *args: Any, **kwargs: Any) -> None:
        FusedEmaAdam.__init__(self, *args, ema_decay=ema_decay, **kwargs)

    return type("FusedEmaAdam", (FusedEmaAdam,), {"__init__": build})


class TorchFusedAdam(FusedAdam):
    """The state and checkpoints of FusedAdam, computed by what torch.optim.AdamW(fused=True) runs.

    torch always corrects the bias of the moments, so `bias_correction=False` stays with FusedAdam.
    """

    updates_halves = False

    def _apply(
        self,
        params: list[Tensor],
        weights: list[Tensor],
        moments: list[list[Tensor]],
        hyper: AdamHyper,
        copies: list[Tensor],
    ) -> None:
        if not hyper.bias_correction:
            super()._apply(params, weights, moments, hyper, copies)
            return
        step = torch._fused_adamw_ if hyper.decoupled else torch._fused_adam_
        beta1, beta2 = hyper.betas
        exp_avgs, exp_avg_sqs = moments
        count = torch.full((), float(hyper.step), device=weights[0].device)
        grads = [grad.to(weight.dtype) for grad, weight in zip(self._grads(params), weights)]
        is_skipped = None
        if self.grad_scale is not None:
            torch._foreach_mul_(grads, self.grad_scale)  # as Megatron clips them
            is_skipped = self.grad_scale.isnan().float()
        step(
            weights,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [count] * len(weights),
            lr=hyper.lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=False,
            found_inf=is_skipped,
        )
        if copies:
            torch._foreach_copy_(copies, weights)
