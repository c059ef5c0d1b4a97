"""A GPT's loss over tiles of the sequence, so that its logits do not grow with it.

A tile keeps its part of the hidden states; its logits are computed again in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mindspeed.config import RankConfigError
from mindspeed.memory.recompute import Recompute, is_kept
from mindspeed.ops.linear_cross_entropy.megatron import PendingLogits

Loss = Callable[[Any, Tensor, Any], Tensor]


def wrap_compute_language_model_loss(original: Loss, size: int) -> Loss:
    """Compute the loss of deferred logits from `size` positions of this rank at a time."""

    @functools.wraps(original)
    def compute_language_model_loss(self: Any, labels: Tensor, logits: Any) -> Tensor:
        if not isinstance(logits, PendingLogits):
            # Only the last pipeline stage has an output layer, which hooks may change at any time.
            raise RankConfigError(
                "--tiled-loss-size needs an output layer that is one plain GEMM: no bias, hook, "
                "padded vocabulary or multi-token prediction; drop it for this model"
            )
        if len(logits.hidden) <= size:
            return original(self, labels, logits)
        return _tiled(functools.partial(original, self), labels, logits, size)

    return compute_language_model_loss


def _tiled(loss: Callable[..., Tensor], labels: Tensor, logits: PendingLogits, size: int) -> Tensor:
    """Return the loss (B, S) of labels (B, S)."""

    def compute(hidden: Tensor, tile_labels: Tensor) -> Tensor:
        # Only the rows of the whole sequence that have a label are known, not those of a tile.
        return loss(tile_labels, replace(logits, hidden=hidden, rows=None))

    # Every rank cuts its part of a split sequence: a tile has positions of all of them.
    parts = labels.unflatten(1, (-1, len(logits.hidden)))
    losses = []
    for hidden, few in zip(logits.hidden.split(size), parts.split(size, dim=2)):
        tile_labels = few.flatten(1)
        recompute = Recompute(compute, hidden, tile_labels)
        with recompute.of_function() if is_kept(hidden) else nullcontext():
            found = compute(hidden, tile_labels)
        losses.append(found.unflatten(1, (parts.shape[1], -1)))
    return torch.cat(losses, dim=2).flatten(1)
