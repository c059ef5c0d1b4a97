"""Sort tokens by expert, and restore their order.

T tokens, top-k experts each. The T * k pairs of token and expert are stably sorted by expert; row j
is the token of the j-th pair. moe_token_permute also returns the row of each pair. Unpermuted token
t is the sum over its k pairs of probs[t, j] times the row of the pair; a dropped row adds nothing.
Rows are copied and summed by `token_rows`, in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed.ops.token_rows import gather_rows, spread_rows


def moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the rows sorted by expert, and the row (T * k,) int32 of each pair.

    Args:
        tokens: (T, H)
        indices: (T, k) or (T,), the experts of each token. In padded mode (E, C), the token of
            each of the C slots of each expert, which is returned unchanged.
        num_out_tokens: the number of rows to return; the last are dropped.
        padded_mode: gather by `indices` directly.
    """
    if padded_mode:
        row_ids, starts = rows_by_token(indices.reshape(-1), len(tokens))
        return spread_rows(tokens, row_ids, indices.numel(), starts), indices
    pairs = indices if indices.ndim == 2 else indices.unsqueeze(1)
    row_ids = rows_of_pairs(pairs.reshape(-1)).view(pairs.shape)
    num_rows = indices.numel()
    if num_out_tokens is not None:
        num_rows = min(num_rows, num_out_tokens)
    return spread_rows(tokens, row_ids, num_rows), row_ids.view(-1)


def rows_of_pairs(experts: Tensor) -> Tensor:
    """Return the rank of each pair in the stable order of experts, int32."""
    # Radix sort takes a pass per byte: int32 halves the work.
    order = experts.to(torch.int32).argsort(stable=True)
    rank = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return torch.empty_like(rank).scatter_(0, order, rank)


def rows_by_token(token: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the rows in the order of their tokens, and the first index of each token."""
    token, rows = token.sort(stable=True)
    numbers = torch.arange(num_tokens + 1, device=token.device, dtype=token.dtype)
    return rows.to(torch.int32), torch.searchsorted(token, numbers)


def moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Return the tokens (T, H) of the rows (R, H).

    Args:
        permuted_tokens: (R, H)
        sorted_indices: (T * k,) the row of each pair, as moe_token_permute returns it. In padded
            mode (E, C), the token of each row.
        probs: (T, k) weights; None for k = 1 without weights. In padded mode (T, E).
        padded_mode: rows are ordered as by moe_token_permute in padded mode.
        restore_shape: (T, H), needed in padded mode only.
    """
    if padded_mode and restore_shape is not None:
        return _from_padded(permuted_tokens, sorted_indices, probs, restore_shape)
    top_k = 1 if probs is None else probs.shape[1]
    return gather_rows(permuted_tokens, sorted_indices.view(-1, top_k), probs)


def _from_padded(
    rows: Tensor, token: Tensor, probs: Tensor | None, restore_shape: Sequence[int]
) -> Tensor:
    token = token.reshape(-1)
    row_ids, starts = rows_by_token(token, restore_shape[0])
    weights = None
    if probs is not None:
        expert = torch.arange(len(rows), device=rows.device) // (len(rows) // probs.shape[1])
        weights = probs[token, expert].index_select(0, row_ids)
    return gather_rows(rows, row_ids, weights, starts)


def check_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> None:
    """Raise ValueError for tokens and indices that do not match."""
    is_match = padded_mode or (indices.ndim in (1, 2) and len(indices) == len(tokens))
    if tokens.ndim != 2 or not is_match or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "moe_token_permute needs tokens (T, H) and integer indices (T, k), got "
            f"{tuple(tokens.shape)} and {tuple(indices.shape)} of {indices.dtype}"
        )
    if num_out_tokens is not None and num_out_tokens < 0:
        raise ValueError(f"num_out_tokens={num_out_tokens}: give a number of rows or None for all")


def check_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> None:
    """Raise ValueError for arguments that do not match."""
    if padded_mode:
        if restore_shape is None:
            raise ValueError("moe_token_unpermute in padded mode needs restore_shape (T, H)")
        return
    pairs = sorted_indices.numel()
    if sorted_indices.ndim != 1 or (probs is not None and probs.numel() != pairs):
        probs_shape = None if probs is None else tuple(probs.shape)
        raise ValueError(
            "moe_token_unpermute needs sorted_indices (T * k,) and probs (T, k), got "
            f"{tuple(sorted_indices.shape)} and {probs_shape}"
        )
