"""Move tokens into the order of their experts and back.

T tokens, E experts, K choices a token, R routed rows. The map that a permute function returns is
one int32 tensor (3 * R + T + 1,): the four parts of `mindspeed.ops.routing_rows` behind each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.moe_token_permute.reference import rows_of_pairs
from mindspeed.ops.routing_rows import routing_rows
from mindspeed.ops.routing_rows.reference import RoutingRows, chunk_rows
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
    num_rows = None if num_out_tokens is None or num_out_tokens < 0 else num_out_tokens
    if map_type == "mask":
        where, _ = routing_rows(routing_map, num_rows)
    else:
        where = _rows_of_index(routing_map, num_rows)
    rows = spread_rows(inp, where.rows, len(where.rows), where.starts)
    return rows, torch.cat(where)


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | None = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Permute tokens and routing weights (T, E) by a mask; return rows, weights (R,) and map."""
    rows, row_id_map = moe_permute(inp, routing_map, num_out_tokens)
    return rows, _weights(probs, row_id_map[: len(rows)]), row_id_map


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
    sizes = (len(inp), len(inp), len(inp), len(row_id_map) - 3 * len(inp))
    where = RoutingRows(*row_id_map.split(sizes))
    weights = None if merging_probs is None else _weights(merging_probs, where.pairs)
    return gather_rows(inp, where.rows, weights, where.starts)


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


def _rows_of_index(experts: Tensor, num_rows: int | None) -> RoutingRows:
    """Number the rows of the experts' numbers (T, K); a pair is a token and a choice here."""
    num_tokens, num_choices = experts.shape
    row = rows_of_pairs(experts.reshape(-1))
    pair = torch.arange(len(row), dtype=torch.int32, device=row.device)
    pair_of_row = torch.empty_like(row).scatter_(0, row.long(), pair)
    if num_rows is None or num_rows >= len(row):
        starts = torch.arange(0, len(row) + 1, num_choices, dtype=torch.int32, device=row.device)
        return RoutingRows(pair_of_row, row, pair, starts)
    pair_of_row = pair_of_row[:num_rows]
    pairs, rows = pair_of_row.sort()
    tokens = torch.arange(num_tokens + 1, dtype=torch.int32, device=row.device)
    starts = torch.searchsorted(pairs, tokens * num_choices, out_int32=True)
    return RoutingRows(pair_of_row, rows.int(), pairs, starts)


def _weights(probs: Tensor, pairs: Tensor) -> Tensor:
    """Return the weights of pairs; none for the pair that is none."""
    return torch.nn.functional.pad(probs.reshape(-1), (0, 1)).index_select(0, pairs)


def _chunk_rows(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    sizes = split_sizes.reshape(-1).to(inp.device, torch.int64)
    order = sorted_index.reshape(-1).to(inp.device, torch.int64)
    return chunk_rows(sizes, order, inp.shape[0])
