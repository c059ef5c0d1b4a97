"""Move tokens into the order of their experts and back.

T tokens, E experts, K choices a token, R routed rows. The map that a permute function returns is
an int64 tensor (3, R): for each row the token it came from (T for a row that has none) and its
column in the routing weights; and the rows once more, in the order of their tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.moe_token_permute.reference import rows_of_pairs
from mindspeed.ops.token_rows import gather_rows, spread_rows

MAP_TYPES = ("mask", "index")


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int | None = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[Tensor, Tensor]:
    """Copy each token (T, H) once per expert it goes to, sorted by expert; return rows and map.

    `routing_map` is a mask (T, E), or with map_type="index" the experts' numbers (T, K).
    `num_out_tokens` is the number of rows; with fewer than routed the last are dropped; -1 or None
    counts them, which waits for the device. `max_token_num` sizes buffers that are not needed here.
    """
    if map_type not in MAP_TYPES:
        raise ValueError(f"map_type={map_type} is not known: use {' or '.join(MAP_TYPES)}")
    make_map = _map_of_mask if map_type == "mask" else _map_of_index
    row_id_map = make_map(routing_map, num_out_tokens)
    starts = _starts(row_id_map, len(inp))
    return spread_rows(inp, row_id_map[2], row_id_map.shape[1], starts), row_id_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | None = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Permute tokens and routing weights (T, E) by a mask; return rows, weights (R,) and map."""
    rows, row_id_map = moe_permute(inp, routing_map, num_out_tokens)
    return rows, _weights(probs, row_id_map), row_id_map


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
) -> Tensor:
    """Add the rows (R, H) of every token up, each times its weight if `merging_probs` are given.

    Both types of map look the same here, so `map_type` does not matter.
    """
    if restore_shape is not None:
        num_tokens = restore_shape[0]
    else:
        num_tokens = inp.shape[0] if merging_probs is None else merging_probs.shape[0]
    by_token = row_id_map[2]
    weights = None
    if merging_probs is not None:
        weights = _weights(merging_probs, row_id_map).index_select(0, by_token)
    return gather_rows(inp, by_token, weights, _starts(row_id_map, num_tokens))


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Cut dim 0 into chunks of `split_sizes` and put them in the order of `sorted_index`."""
    rows = _chunk_rows(inp, split_sizes, sorted_index)
    return gather_rows(inp, rows.unsqueeze(1))  # no row twice: the gradient is written, not added


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Reorder chunks of tokens and of their weights alike."""
    rows = _chunk_rows(inp, split_sizes, sorted_index)
    return gather_rows(inp, rows.unsqueeze(1)), probs.index_select(0, rows)


def _map_of_mask(routing_map: Tensor, num_rows: int | None) -> Tensor:
    num_tokens, num_experts = routing_map.shape
    routed = routing_map.bool().T.reshape(-1)  # by expert, then by token
    if num_rows is None or num_rows < 0:
        num_rows = int(routed.sum())
    # Pair number -> row number by a running count; the rest shares one slot behind the last row.
    row = torch.where(routed, routed.cumsum(0) - 1, num_rows).clamp_(max=num_rows)
    row = row.view(num_experts, num_tokens).T.reshape(-1)
    has_row = row < num_rows
    rank = torch.where(has_row, has_row.cumsum(0) - 1, num_rows)

    pair = torch.arange(row.numel(), device=row.device)
    slots = num_rows + 1
    token = torch.full((slots,), num_tokens, device=row.device).scatter_(
        0, row, pair // num_experts
    )
    column = torch.zeros(slots, dtype=torch.int64, device=row.device)
    column.scatter_(0, row, pair % num_experts)
    by_token = torch.arange(slots, device=row.device).scatter_(0, rank, row)
    return torch.stack([token, column, by_token])[:, :num_rows]


def _map_of_index(experts: Tensor, num_rows: int | None) -> Tensor:
    num_choices = experts.shape[1]
    row = rows_of_pairs(experts.reshape(-1)).long()
    pairs = torch.empty_like(row).scatter_(0, row, torch.arange(len(row), device=row.device))
    if num_rows is not None and 0 <= num_rows < len(pairs):
        pairs = pairs[:num_rows]
        row = pairs.argsort()
    return torch.stack([pairs // num_choices, pairs % num_choices, row])


def _starts(row_id_map: Tensor, num_tokens: int) -> Tensor:
    """Return where the rows of each token begin in the order of tokens."""
    token = row_id_map[0].index_select(0, row_id_map[2])
    return torch.searchsorted(token, torch.arange(num_tokens + 1, device=token.device))


def _weights(probs: Tensor, row_id_map: Tensor) -> Tensor:
    """Return the weight of each row, in the order of rows; none for a row without a token."""
    token, column, _ = row_id_map
    weights = probs[token.clamp(max=len(probs) - 1), column]
    return weights.where(token < len(probs), 0.0)


def _chunk_rows(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    sizes = split_sizes.reshape(-1).to(inp.device, torch.int64)
    order = sorted_index.reshape(-1).to(inp.device, torch.int64)
    starts = sizes.cumsum(0) - sizes
    taken = sizes[order]
    shift = starts[order] - (taken.cumsum(0) - taken)
    shift = shift.repeat_interleave(taken, output_size=inp.shape[0])
    return torch.arange(inp.shape[0], device=inp.device) + shift
