"""Row numbers of a routing mask, and of chunks that change their order, in plain torch.

T tokens, E experts, R rows: one for each pair of token and expert in the mask, by expert and then
by token; rows from R on are dropped. Pair t * E + e is expert e of token t; pair T * E is none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RoutingRows(NamedTuple):
    """The rows of a routing mask, all int32."""

    pair_of_row: Tensor
    """(R,) the pair of each row"""
    rows: Tensor
    """(R,) the rows in the order of their tokens"""
    pairs: Tensor
    """(R,) the pairs in that order"""
    starts: Tensor
    """(T + 1,) the first index of each token in that order"""


def routing_rows(routing_map: Tensor, num_rows: int | None = None) -> tuple[RoutingRows, Tensor]:
    """Number the rows of a mask (T, E); without num_rows, synchronise with the device and count.

    Also return the first row of each expert, and the end of the last: (E + 1,) int32.
    """
    num_tokens, num_experts = routing_map.shape
    routed = routing_map.bool().T.reshape(-1)  # by expert, then by token
    if num_rows is None:
        num_rows = int(routed.sum())
    # Pair number -> row number by a cumulative count; the rest shares one slot after the last row.
    row = torch.where(routed, routed.cumsum(0) - 1, num_rows).clamp_(max=num_rows)
    row = row.view(num_experts, num_tokens).T.reshape(-1)
    has_row = row < num_rows
    rank = torch.where(has_row, has_row.cumsum(0) - 1, num_rows)
    counts = has_row.view(num_tokens, num_experts).sum(1).cumsum(0)

    none = row.numel()
    pair = torch.arange(none, device=row.device)
    slots = torch.full((3, num_rows + 1), none, device=row.device)
    slots[0].scatter_(0, row, pair)
    slots[1].scatter_(0, rank, row)
    slots[2].scatter_(0, rank, pair)
    pair_of_row, rows, pairs = slots[:, :num_rows].int()
    starts = _after_zero(counts)
    ends = routed.view(num_experts, num_tokens).sum(1).cumsum(0).clamp_(max=num_rows)
    return RoutingRows(pair_of_row, rows, pairs, starts), _after_zero(ends)


def _after_zero(ends: Tensor) -> Tensor:
    return torch.cat([ends.new_zeros(1), ends]).int()


def check(routing_map: Tensor, num_rows: int | None = None) -> None:
    """Raise ValueError for anything but a mask and a number of rows."""
    if routing_map.ndim != 2 or routing_map.is_floating_point():
        raise ValueError(
            f"routing_rows needs a mask (T, E), got {tuple(routing_map.shape)} of "
            f"{routing_map.dtype}"
        )
    if num_rows is not None and num_rows < 0:
        raise ValueError(f"num_rows={num_rows}: give a number of rows or None to count them")


def chunk_rows(sizes: Tensor, order: Tensor, num_rows: int) -> Tensor:
    """Return the row that each row of the result comes from: chunk order[0] first, and so on.

    Args:
        sizes: (chunks,) rows of each chunk, `num_rows` together.
        order: (chunks,) the chunks of the result.
        num_rows: given, so that the device need not be waited for.
    """
    starts = sizes.cumsum(0) - sizes
    taken = sizes[order]
    shift = starts[order] - (taken.cumsum(0) - taken)
    shift = shift.repeat_interleave(taken, output_size=num_rows)
    return torch.arange(num_rows, device=sizes.device) + shift
