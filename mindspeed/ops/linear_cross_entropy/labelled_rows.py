"""The rows of hidden states that have a label: no other needs logits.

Which rows have one is known where batches are made, so the host knows how many there are, and
nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
MAX_SHARE = 0.9
"""Where more of the rows than this would be picked, all are computed and none is copied."""
SHAPES = 64
"""About how many numbers of picked rows there are: kernels and memory see few shapes."""


@dataclass(frozen=True)
class LabelledRows:
    """Which rows have a label; `index` goes on with row 0 after the first `count` of them."""

    index: Tensor
    count: int

    @classmethod
    def of(cls, loss_mask: Tensor) -> LabelledRows | None:
        """Find the rows, in Megatron's order (S, B), of a mask (B, S) on the host.

        None if so many rows have a label that picking them does not pay.
        """
        found = loss_mask.t().flatten().nonzero().flatten()
        granule = 1 << max(loss_mask.numel() // SHAPES, 1).bit_length() - 1
        size = max(-(-len(found) // granule), 1) * granule
        if size > MAX_SHARE * loss_mask.numel():
            return None
        return cls(torch.nn.functional.pad(found, (0, size - len(found))), len(found))

    def pick(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows (R, H) of hidden (S, B, H) with their labels (R,), of labels (S, B)."""
        picked: Tensor = _Pick.apply(hidden.flatten(0, 1), self.index, self.count)
        few = labels.flatten().index_select(0, self.index)
        few[self.count :] = IGNORED
        return picked, few

    def spread(self, losses: Tensor, like: Tensor) -> Tensor:
        """Return the losses (R,) of picked rows in the shape of `like`, 0 where no label is."""
        zeros = losses.new_zeros(like.numel())
        return zeros.index_copy(0, self.index[: self.count], losses[: self.count]).view_as(like)


class _Pick(torch.autograd.Function):
    """Select rows, each but those at the end once: the gradient is a copy, where torch adds."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index[:count])
        ctx.num_rows = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        zeros = grad.new_zeros(ctx.num_rows, grad.shape[1])
        return zeros.index_copy_(0, index, grad[: len(index)]), None, None
