"""Wraps Megatron's cross entropy functions around the operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed.ops.cross_entropy import cross_entropy


def wrap_vocab_parallel_cross_entropy(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace the unfused function; label smoothing, defined differently there, falls back."""

    @functools.wraps(original)
    def vocab_parallel_cross_entropy(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        label_smoothing: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if label_smoothing:
            return original(vocab_parallel_logits, target, label_smoothing, *args, **kwargs)
        group = args[0] if args else kwargs.get("tp_group")
        return _loss(vocab_parallel_logits, target, group or _tensor_parallel_group())

    return vocab_parallel_cross_entropy


def wrap_fused_vocab_parallel_cross_entropy(
    original: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    """Replace the function behind `--cross-entropy-loss-fusion` (native implementation)."""

    @functools.wraps(original)
    def fused_vocab_parallel_cross_entropy(
        vocab_parallel_logits: Tensor, target: Tensor, tp_group: ProcessGroup
    ) -> Tensor:
        return _loss(vocab_parallel_logits, target, tp_group)

    return fused_vocab_parallel_cross_entropy


def wrap_unless_bfloat16(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace the fused function for all dtypes but bfloat16, to which it casts the gradient."""

    @functools.wraps(original)
    def fused_vocab_parallel_cross_entropy(
        vocab_parallel_logits: Tensor, target: Tensor, tp_group: ProcessGroup
    ) -> Tensor:
        if vocab_parallel_logits.dtype == torch.bfloat16:
            return original(vocab_parallel_logits, target, tp_group)
        return _loss(vocab_parallel_logits, target, tp_group)

    return fused_vocab_parallel_cross_entropy


def _loss(logits: Tensor, target: Tensor, group: ProcessGroup) -> Tensor:
    # As in Megatron, logits computed for the loss have no other reader; a leaf is the caller's.
    return cross_entropy(logits, target, group, in_place=not logits.is_leaf)


def _tensor_parallel_group() -> ProcessGroup:
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    return get_tensor_model_parallel_group()
