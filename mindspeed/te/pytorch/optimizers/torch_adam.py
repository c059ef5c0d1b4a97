"""FusedAdam whose step is torch's own fused kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.adamw.reference import AdamHyper
from mindspeed.te.pytorch.optimizers.fused_adam import FusedAdam


class TorchFusedAdam(FusedAdam):
    """The state and checkpoints of FusedAdam, computed by what torch.optim.AdamW(fused=True) runs.

    torch always corrects the bias of the moments, so `bias_correction=False` stays with FusedAdam.
    """

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
        step(
            weights,
            [grad.to(weight.dtype) for grad, weight in zip(self._grads(params), weights)],
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
        )
        if copies:
            torch._foreach_copy_(copies, weights)
