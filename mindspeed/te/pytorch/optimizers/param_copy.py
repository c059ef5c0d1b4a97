"""Model parameters that Adam writes in its own pass, instead of a copy of each after the step.

Megatron's optimizers of 16-bit parameters update float32 main parameters, then copy each to the
model. Here FusedAdam gets, for one step, what Megatron would copy to; its copy then has the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain, compress
from typing import Any

from torch import Tensor

from mindspeed.te.pytorch.optimizers.fused_adam import FusedAdam


def wrap_step_with_ready_grads(original: Callable[..., bool]) -> Callable[..., bool]:
    """Let the FusedAdam inside write the model parameters too."""

    @functools.wraps(original)
    def step_with_ready_grads(self: Any) -> bool:
        adam = self.optimizer
        if not isinstance(adam, FusedAdam):
            return original(self)
        # For each step again: parameters and their buffers may have been replaced since the last.
        adam.copies = _copies(self)
        try:
            return original(self)
        finally:
            adam.copies, adam.copied = {}, set()

    return step_with_ready_grads


def wrap_copy_main_params(original: Callable[..., None]) -> Callable[..., None]:
    """Hide the parameters that the current step has written from Megatron's copy."""

    @functools.wraps(original)
    def _copy_main_params_to_model_params(self: Any) -> None:
        copied = getattr(self.optimizer, "copied", None)
        if not copied:  # outside of a step, for example
            original(self)
            return
        names = _group_names(self)
        whole = [getattr(self, name) for name in names]
        is_left = [[main not in copied for main in mains] for mains in whole[0]]
        for name, groups in zip(names, whole):
            setattr(self, name, [list(compress(*pair)) for pair in zip(groups, is_left)])
        try:
            original(self)
        finally:
            for name, groups in zip(names, whole):
                setattr(self, name, groups)

    return _copy_main_params_to_model_params


def _copies(optimizer: Any) -> dict[Tensor, Tensor]:
    """Return the memory of each model parameter, or of this rank's shard, by main parameter."""
    # MXFP8 parameters are gathered in the memory of the gradients that Adam is about to read.
    shares_memory = getattr(optimizer.config, "reuse_grad_buf_for_mxfp8_param_ag", False)
    if optimizer.optimizer.master_weights or shares_memory:
        return {}
    # Megatron's FSDP has no such groups.
    mains, models = (getattr(optimizer, name, ()) for name in _group_names(optimizer))
    pairs = zip(chain.from_iterable(mains), chain.from_iterable(models))
    # Another type is quantized: Megatron has more to do than to copy.
    return {main: _memory(optimizer, model) for main, model in pairs if type(model.data) is Tensor}


def _group_names(optimizer: Any) -> tuple[str, str]:
    """Return where an optimizer keeps its main and its model parameters, group by group."""
    if _is_distributed(optimizer):
        return "shard_fp32_from_float16_groups", "model_float16_groups"
    return "fp32_from_float16_groups", "float16_groups"


def _is_distributed(optimizer: Any) -> bool:
    return hasattr(optimizer, "ddp_config")


def _memory(optimizer: Any, model: Any) -> Tensor:
    if not _is_distributed(optimizer):
        return model.data  # type: ignore[no-any-return]
    index, _, bucket = optimizer.model_param_gbuf_map[model]
    part = optimizer._get_model_param_range_map(model)["gbuf_world_in_bucket"]
    buffer: Tensor = optimizer.buffers[index].buckets[bucket].param_data
    return buffer.view(-1)[part.start : part.end]
