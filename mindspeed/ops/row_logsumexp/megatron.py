"""Wraps the z-loss of Megatron's routers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed.ops.row_logsumexp import row_logsumexp


def wrap_z_loss(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Reduce the scores (T, E) by the operator; Megatron computes its loss of what is left.

    The logarithm of the sum over one column is that column: its means and masks stay its own.
    """

    @functools.wraps(original)
    def z_loss_func(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        reduced = row_logsumexp(logits.flatten(0, -2)).view(*logits.shape[:-1], 1)
        return original(reduced, *args, **kwargs)

    return z_loss_func
