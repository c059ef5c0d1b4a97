"""One copy of the parameters: float32 masters kept as the bfloat16 parameters and 16 bits more.

Adam joins, updates and splits them in one pass (`mindspeed.ops.adamw.halves`). Megatron's
distributed optimizer has such a mode; its other one gets it here. What is saved are whole masters
under the usual names: a checkpoint does not show how they were kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MASTER = "master_param"


def wrap_config_post_init(original: Callable[..., None]) -> Callable[..., None]:
    """Ask Megatron for remainders, where it trains bfloat16 parameters with Adam."""

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        if not (self.bf16 and self.optimizer == "adam"):
            original(self)
            return
        self.use_precision_aware_optimizer = self.use_distributed_optimizer
        self.store_param_remainders = True  # older releases have no other mode
        original(self)
        # Checked for the distributed optimizer only: the other one is the class below.
        self.use_precision_aware_optimizer = True
        self.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True

    return post_init


def wrap_float16_optimizer(original: type) -> type:
    """Return Megatron's optimizer of 16-bit parameters without float32 copies of them."""

    if issubclass(original, _WithRemainders):  # another feature has asked for it
        return original

    class Float16OptimizerWithRemainders(_WithRemainders, original):  # type: ignore[misc, valid-type]
        pass

    return Float16OptimizerWithRemainders


class _WithRemainders:
    """What differs from Megatron's Float16OptimizerWithFloat16Params.

    The optimizer inside, a FusedAdam, holds the bfloat16 parameters, and reads their gradients from
    `decoupled_grad`: torch lets a bfloat16 parameter have no float32 gradient.
    """

    optimizer: Any
    float16_groups: list[list[Any]]
    fp32_from_fp32_groups: list[list[Any]]
    fp32_from_float16_groups: list[list[Tensor]]

    def __init__(self, optimizer: Any, config: Any, grad_scaler: Any, init_state_fn: Any) -> None:
        from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

        # The constructor in between makes the copies.
        MixedPrecisionOptimizer.__init__(self, optimizer, config, grad_scaler, init_state_fn)
        self.is_stub_optimizer = not optimizer
        if not optimizer:
            return
        groups = [[p for p in g["params"] if p.requires_grad] for g in optimizer.param_groups]
        self.float16_groups = [[p for p in g if p.dtype == torch.bfloat16] for g in groups]
        self.fp32_from_fp32_groups = [[p for p in g if p.dtype == torch.float32] for g in groups]
        self.fp32_from_float16_groups = [[] for _ in groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters."""
        if not self.is_stub_optimizer:
            self.optimizer.zero_grad(set_to_none)
            for param in self._params():
                param.grad = None

    def _params(self) -> list[Any]:
        groups = (*self.float16_groups, *self.fp32_from_fp32_groups)
        return [param for group in groups for param in group]

    def _collect_main_grad_data_for_unscaling(self) -> list[Tensor]:
        if self.is_stub_optimizer:
            return []
        grads = (getattr(param, "decoupled_grad", None) for param in self._params())
        return [grad for grad in grads if grad is not None]

    def _copy_model_grads_to_main_grads(self) -> None:
        for param in self._params():
            grad = getattr(param, "main_grad", param.grad)
            param.decoupled_grad = None if grad is None else grad.float()
            param.grad = None

    def _copy_main_params_to_model_params(self) -> None:
        """Do nothing: Adam updates the parameters themselves."""

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        assert state_dict is None, "masters are not loaded from a state dict of the model"
        for param in self._params():
            if self.optimizer.state.get(param):
                self.optimizer.set_scaled_state(param, MASTER, param.detach().float())

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """Return what Megatron's optimizer returns, masters whole."""
        state: dict[str, Any] = super().state_dict(is_loading)  # type: ignore[misc]
        state["fp32_from_fp16_params"] = self._masters()
        for each in state["optimizer"]["state"].values():
            each.pop(MASTER, None)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what either optimizer saved."""
        self.fp32_from_float16_groups = self._masters()
        super().load_state_dict(state_dict)  # type: ignore[misc]
        for params, masters in zip(self.float16_groups, self.fp32_from_float16_groups):
            for param, master in zip(params, masters):
                self.optimizer.set_scaled_state(param, MASTER, master)
        for param in (param for group in self.fp32_from_fp32_groups for param in group):
            if self.optimizer.state.get(param):
                self.optimizer.set_scaled_state(param, MASTER, param.detach())
        self.fp32_from_float16_groups = [[] for _ in self.float16_groups]

    def _masters(self) -> list[list[Tensor]]:
        return [[self._master(param) for param in group] for group in self.float16_groups]

    def _master(self, param: Any) -> Tensor:
        if MASTER not in self.optimizer.state.get(param, ()):
            return param.detach().float()
        master: Tensor = self.optimizer.get_unscaled_state(param, MASTER)
        return master
