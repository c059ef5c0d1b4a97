"""What is computed between queries and keys, whichever rank holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mindspeed.ops.partial_attention import reference
from mindspeed.parallel.context.blocks import Block, Call, Spans, Window, plan
from mindspeed.parallel.context.layout import Range


@dataclass(frozen=True, eq=False)
class Rule:
    """The documents, which keys a query of a document sees, and how they are scored.

    Scores are scale * q k^T + bias - slope * |i - j|.
    """

    spans: Spans
    window: Window
    scale: float
    bias: Tensor | None = None
    """(1 or B, 1 or N, 1 or S, keys of the whole sequence): the rows of a rank, all keys in the
    order of the sequence."""
    slopes: Tensor | None = None
    """(N,) of ALiBi."""

    @property
    def has_bias(self) -> bool:
        """Whether scores depend on where queries and keys are."""
        return self.bias is not None or self.slopes is not None

    def of_rows(self, rows: int, padded_rows: int) -> Rule:
        """Return the rule with the bias of the first rows of those that a rank holds."""
        if self.bias is None:
            return self
        return replace(self, bias=self.bias.expand(-1, -1, padded_rows, -1)[:, :, :rows])

    def calls(
        self, q_ranges: tuple[Range, ...], k_ranges: tuple[Range, ...], q: Tensor
    ) -> Iterator[Call]:
        """Return the calls for some rows of queries and keys; a rank without heads has none."""
        if not q.shape[2]:
            return
        for call in plan(self.spans, q_ranges, k_ranges, self.window, not self.has_bias):
            if q.shape[1] == 1:
                yield call
            else:  # packed kernels take one sequence: documents of a batch go one by one
                yield from (Call((block,)) for block in call.blocks)

    def bias_of(self, block: Block, device: torch.device) -> Tensor | None:
        """Return the bias of a block, (1 or B, 1 or N, queries, keys)."""
        total = None if self.bias is None else self.bias[..., slice(*block.q), keys_of(block)]
        if self.slopes is not None:
            query = torch.arange(block.q[1] - block.q[0], device=device) + block.q_start
            key = torch.arange(block.k[1] - block.k[0], device=device) + block.k_start
            distance = (query.unsqueeze(1) - key).abs()
            alibi = -self.slopes.view(1, -1, 1, 1) * distance
            total = alibi if total is None else total + alibi
        return total

    @torch.no_grad()
    def largest(self, q: Tensor, k: Tensor, calls: Iterable[Call]) -> Tensor:
        """Return the largest score of each head, (N,), in float32."""
        found = q.new_full((q.shape[2],), float("-inf"), dtype=torch.float32)
        for call in calls:
            for block in call.blocks:
                queries, keys = (
                    x[slice(*rows)].transpose(0, 1) for x, rows in ((q, block.q), (k, block.k))
                )
                bias = self.bias_of(block, q.device)
                largest = reference.largest(queries, keys, self.scale, call.window, bias)
                found = torch.maximum(found, largest.to(found.dtype))
        return found


def keys_of(block: Block) -> slice:
    """Return the columns of a bias that belong to the keys of a block."""
    return slice(block.k_start, block.k_start + block.k[1] - block.k[0])
