"""The share of a micro-batch that a context-parallel rank trains on.

Every rank of a group collates the same micro-batch on the host, and keeps its rows of each
sequence, in the zigzag order in which Megatron expects them, or its share of packed documents.
These are padded so that all ranks have equally many rows: `cu_seqlens_padded` says where documents
are, `cu_seqlens` how long they are without the padding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from mindspeed.distributed.parallel_dims import CP, ParallelDims
from mindspeed.parallel.context.layout import Layout
from mindspeed.parallel.context.whole_documents import DOCUMENT_LAYOUTS
from mindspeed_llm.data.shared_prompts import KEY_BOUNDS

logger = logging.getLogger(__name__)

MAX_PADDING = 0.1
"""Share of a batch that padding may have without a warning."""
ROWS = ("tokens", "labels", "loss_mask", "position_ids", "is_last")
"""Tensors of a batch whose second dimension is the sequence."""


@dataclass(frozen=True)
class ContextSplit:
    """How sequences are shared by `size` ranks, and further by the ranks of each with `tp`."""

    size: int = 1
    rank: int = 0
    tp: int = 1
    """Tensor-parallel ranks, which take equal shares of what a rank holds."""
    document_layout: str = "whole"
    """Whether packed documents stay whole, but for a few, or each is shared by all ranks (zigzag,
    which pads each to two equal pieces a rank)."""

    @classmethod
    def of(cls, dims: ParallelDims, document_layout: str) -> ContextSplit:
        """Read the sizes of a run."""
        return cls(dims.cp, dims.cp_rank, dims.tp, document_layout)

    @property
    def multiple(self) -> int:
        """What the length of a batch is a multiple of; 1 where sequences are not split."""
        return 1 if self.size == 1 else self.size * math.lcm(2, self.tp)

    def padded(self, length: int) -> int:
        """Return the length of a sequence with padding."""
        return _round_up(length, self.multiple)

    def padded_bounds(self, bounds: Sequence[int]) -> list[int]:
        """Return cumulative lengths with padding, behind the last document or behind each."""
        if self.size == 1:
            return list(bounds)
        multiple = 2 * self.size if self.document_layout == "zigzag" else 1
        lengths = [_round_up(end - start, multiple) for start, end in pairwise(bounds)]
        padded = list(accumulate(lengths, initial=0))
        padded[-1] = self.padded(padded[-1])
        return padded

    def layout(self, bounds: Sequence[int]) -> Layout:
        """Return which rows of padded documents each rank holds; one document in zigzag order."""
        return DOCUMENT_LAYOUTS[self.document_layout](self.padded_bounds(bounds), self.size)

    def source_rows(self, bounds: Sequence[int]) -> torch.Tensor:
        """Return which row of the documents each row of this rank is, -1 for padding."""
        starts, ends = torch.tensor(bounds[:-1]), torch.tensor(bounds[1:])
        padded = torch.tensor(self.padded_bounds(bounds))
        rows = self.layout(bounds).index(self.rank)
        document = torch.searchsorted(padded, rows, right=True) - 1
        source = starts[document] + rows - padded[document]
        return torch.where(source < ends[document], source, -1)

    def owned(self, bounds: Sequence[int]) -> list[tuple[int, int]]:
        """Return the ranges of rows that this rank holds, padding left out, in their order."""
        rows = self.source_rows(bounds)
        rows = rows[rows >= 0]
        first = torch.cat([torch.ones(1, dtype=torch.bool), rows.diff() != 1])[: len(rows)]
        starts = rows[first].tolist()
        sizes = torch.bincount(first.cumsum(0) - 1).tolist()
        return [(start, start + size) for start, size in zip(starts, sizes)]

    def split(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's share of a micro-batch on the host.

        `trained_tokens` is the number of trained tokens of the whole micro-batch, `local_lengths`
        how many rows of each document are here.
        """
        if self.size == 1:
            return dict(batch)
        is_packed = "cu_seqlens" in batch
        bounds = batch["cu_seqlens"].tolist() if is_packed else [0, batch["tokens"].shape[1]]
        rows, share = self.source_rows(bounds), dict(batch)
        for name in filter(batch.__contains__, ROWS):
            share[name] = batch[name].index_select(1, rows.clamp(min=0)).masked_fill_(rows < 0, 0)
        share["trained_tokens"] = batch["loss_mask"].sum()
        if is_packed:
            padded = torch.tensor(self.padded_bounds(bounds), dtype=torch.int32)
            share["cu_seqlens_padded"] = padded
            document = torch.searchsorted(padded, self.layout(bounds).index(self.rank), right=True)
            share["local_lengths"] = torch.bincount(document - 1, minlength=len(bounds) - 1)
            share["max_seqlen"] = padded.diff().max()
        return share


class PaddingWatch:
    """Warns once if much of a packed batch is padding, or of any batch if it is routed.

    `is_shortest` is whether neither --variable-seq-lengths nor packed rows would have less of it,
    `may_pack` whether preprocess could fill the rows.
    """

    def __init__(
        self,
        split: ContextSplit,
        *,
        is_routed: bool = False,
        is_shortest: bool = False,
        may_pack: bool = False,
    ) -> None:
        self._split, self._is_routed = split, is_routed
        self._is_shortest, self._may_pack = is_shortest, may_pack
        self._has_warned = False

    def watch(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a rank's share of a micro-batch as it is."""
        is_counted = self._is_routed and "real_tokens" in batch  # prompts are not: they are sampled
        if self._has_warned or not (is_counted or "cu_seqlens" in batch):
            return batch
        tokens = batch["tokens"].numel() * self._split.size
        share = 1 - _used_rows(batch) / tokens
        if share > MAX_PADDING:
            self._has_warned = True
            logger.warning("%s", self._text(share, tokens, is_packed="cu_seqlens" in batch))
        return batch

    def _text(self, share: float, tokens: int, *, is_packed: bool) -> str:
        size, is_zigzag = self._split.size, self._split.document_layout == "zigzag"
        is_padded = is_packed and size > 1 and is_zigzag
        reason = f"; {CP} {size} pads each document to a multiple of {2 * size}" * is_padded
        if self._is_routed:
            reason += "; routers send it to experts, and count it in loads, losses and biases"
        fill = ", or fill rows by preprocess (--pack --neat-pack)" * self._may_pack
        advice = f"give --variable-seq-lengths or a smaller --seq-length{fill}"
        if self._is_shortest:
            advice = (
                "rows hold one sample each: use samples of similar lengths, and a --seq-length "
                "that is not above the longest"
            )
        if is_packed:
            where = " where training joins samples" * self._may_pack
            advice = f"give a larger --micro-batch-size{where}{fill}"
        kind = "packed batch" if is_packed else "batch"
        return f"{share:.0%} of the {tokens} tokens of a {kind} are padding{reason}: {advice}"


def _used_rows(batch: Mapping[str, torch.Tensor]) -> int:
    """Return the rows without padding; those of a prompt that a pair shares count once."""
    if KEY_BOUNDS in batch:
        return int(batch["cu_seqlens"][int(batch["num_sequences"])])
    return int(batch["real_tokens"])


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
