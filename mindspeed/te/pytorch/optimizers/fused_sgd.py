"""FusedSGD: torch's own multi-tensor SGD under the name Megatron imports."""

from __future__ import annotations

from typing import Any

import torch


class FusedSGD(torch.optim.SGD):
    """SGD with momentum, weight decay and Nesterov momentum on lists of tensors."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
    ) -> None:
        if wd_after_momentum:
            raise ValueError("FusedSGD(wd_after_momentum=True) is not supported: use False")
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            foreach=True,
        )
