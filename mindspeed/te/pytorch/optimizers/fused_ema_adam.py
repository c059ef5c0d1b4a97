"""FusedAdam that also keeps an exponential moving average of the weights, in the same pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops.adamw import adamw
from mindspeed.ops.adamw.reference import AdamHyper
from mindspeed.te.pytorch.optimizers.fused_adam import MASTER, FusedAdam

AVERAGE = "ema_params"


class FusedEmaAdam(FusedAdam):
    """FusedAdam with a state more: `ema_params`, float32, which starts as the weights.

    The decay of step n is min(ema_decay, (1 + n) / (10 + n)): early averages follow the weights.
    """

    updates_halves = False

    def __init__(self, params: Any, *args: Any, ema_decay: float = 0.9999, **kwargs: Any) -> None:
        if not 0.0 <= ema_decay <= 1.0:
            raise ValueError(f"ema_decay must be from 0 to 1, got {ema_decay}")
        super().__init__(params, *args, **kwargs)
        self.ema_decay = ema_decay
        self._dtypes[AVERAGE] = torch.float32

    def initialize_state(self, param: Tensor) -> None:
        """Create the moments, the master weights where they are kept, and the average."""
        super().initialize_state(param)
        self._start_average(param, param.detach())

    def complete_state(self) -> None:
        """Start the average of parameters whose other state was created or loaded elsewhere."""
        for param in self._all_params():
            if self.state.get(param):
                self._start_average(param, self._work(param, MASTER))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; where it was saved without an average, a new average starts."""
        super().load_state_dict(state_dict)
        self.complete_state()

    def averages(self) -> dict[Tensor, Tensor]:
        """Return the average of every parameter that has one."""
        states = ((param, self.state.get(param, {})) for param in self._all_params())
        return {param: state[AVERAGE] for param, state in states if AVERAGE in state}

    def _apply(
        self,
        params: list[Tensor],
        weights: list[Tensor],
        moments: list[list[Tensor]],
        hyper: AdamHyper,
        copies: list[Tensor],
    ) -> None:
        for param, weight in zip(params, weights):
            self._start_average(param, weight)
        decay = min(self.ema_decay, (1 + hyper.step) / (10 + hyper.step))
        adamw(
            weights,
            self._grads(params),
            *moments,
            replace(hyper, ema_decay=decay),
            averages=[self.state[param][AVERAGE] for param in params],
            copies=copies,
            grad_scale=self.grad_scale,
        )

    def _start_average(self, param: Tensor, weight: Tensor) -> None:
        if AVERAGE not in self.state[param]:
            self._store(param, AVERAGE, weight.float().clone())
