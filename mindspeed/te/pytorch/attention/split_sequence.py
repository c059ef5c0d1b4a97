"""Attention of sequences that are split over context-parallel ranks, in Megatron's layouts.

Every rank holds equally many rows of a batch, in zigzag order, or its share of packed documents, of
which the cumulative lengths are those of the whole documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed.ops.packed_batch import host_bounds
from mindspeed.parallel.context.attention import (
    ContextParallel,
    context_attention,
    largest_scores,
)
from mindspeed.parallel.context.blocks import Spans
from mindspeed.parallel.context.layout import Layout
from mindspeed.parallel.context.rule import Rule
from mindspeed.te.pytorch.attention.masks import MaskRule, MaskTensors, visible_keys


@dataclass(frozen=True)
class SplitSequence:
    """The documents of a split sequence, its layout, and what is computed."""

    context: ContextParallel
    layout: Layout
    rule: Rule

    @classmethod
    def of_batch(
        cls,
        context: ContextParallel,
        lengths: tuple[int, int],
        mask_rule: MaskRule,
        scale: float,
        *,
        mask: MaskTensors = None,
        bias: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> SplitSequence:
        """Describe a batch by how many queries and keys of it this and every other rank holds.

        `mask` and `bias` have the rows of this rank and the columns of the whole sequence.
        """
        if lengths[0] != lengths[1]:
            raise _two_sequences(f"{lengths[0]} queries and {lengths[1]} keys")
        length = lengths[0] * context.size
        if mask_rule.reads_mask:
            bias = _with_mask(bias, visible_keys(mask, mask_rule.kind))
        if bias is not None and bias.shape[-1] != length:
            raise ValueError(
                f"mask or bias of shape {tuple(bias.shape)}: a rank needs its rows and all "
                f"{length} columns of the sequence"
            )
        rule = Rule(Spans.whole(length), mask_rule.window, scale, bias, slopes)
        return cls(context, Layout.zigzag(length, context.size), rule)

    @classmethod
    def of_documents(
        cls,
        context: ContextParallel,
        bounds: tuple[Tensor, Tensor | None],
        key_bounds: tuple[Tensor, Tensor | None],
        mask_rule: MaskRule,
        scale: float,
        *,
        slopes: Tensor | None = None,
        make_layout: Callable[[Sequence[int], int], Layout] = Layout.zigzag_documents,
    ) -> SplitSequence:
        """Describe packed documents by cumulative lengths without and with padding."""
        of_q, of_k = (
            tuple(None if x is None else tuple(host_bounds(x)) for x in pair)
            for pair in (bounds, key_bounds)
        )
        if of_q != of_k:
            raise _two_sequences("cu_seqlens_q and cu_seqlens_kv differ")
        real, padded = of_q
        assert real is not None
        layout = make_layout(real if padded is None else padded, context.size)
        rule = Rule(Spans.packed(real, padded), mask_rule.window, scale, slopes=slopes)
        return cls(context, layout, rule)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend (S, B, N, H) or packed (T, N, H) tensors; return the heads of a row in one dim."""
        if q.dim() == 3:
            return self.attend(*(x.unsqueeze(1) for x in (q, k, v))).squeeze(1)
        return context_attention(q, k, v, self.context, self.layout, self.rule).flatten(2)

    def largest(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the largest score of each head over all ranks, (N,)."""
        if q.dim() == 3:
            q, k = q.unsqueeze(1), k.unsqueeze(1)
        return largest_scores(q, k, self.context, self.layout, self.rule)


def _two_sequences(given: str) -> ValueError:
    return ValueError(
        f"{given}: attention between two sequences cannot be split over ranks, use "
        "context_parallel_size=1"
    )


def _with_mask(bias: Tensor | None, visible: Tensor) -> Tensor:
    hidden = torch.zeros(visible.shape, device=visible.device).masked_fill(~visible, float("-inf"))
    return hidden if bias is None else bias + hidden
