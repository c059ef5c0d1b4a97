"""FusedAdam whose step is torch's own fused kernel."""

from __future__ import annotations

from collections.abc import Sequence

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
        copies: Sequence[Tensor],
    ) -> None:
        if not hyper.bias_correction:
            super()._apply(params, weights, moments, hyper, copies)
            return
        step = torch._fused_adamw_ if hyper.decoupled else torch._fused_adam_
        beta1, beta2 = hyper.betas
        count = torch.full((), float(hyper.step), device=weights[0].device)
        step(
            weights,
            [self._grad(param).to(weight.dtype) for param, weight in zip(params, weights)],
            *moments,
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
