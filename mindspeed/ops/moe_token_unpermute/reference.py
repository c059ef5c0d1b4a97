"""Bring rows that were sorted by expert back to their tokens.

Token t is the sum over its k pairs of probs[t, j] times the row that the pair has; a row that was
dropped adds nothing. Sums are float32 and rounded once. The work is `token_rows`' gather_rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed.ops.moe_token_permute.reference import rows_by_token
from mindspeed.ops.token_rows import gather_rows


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
        padded_mode: rows lie as moe_token_permute's padded mode made them.
        restore_shape: (T, H), needed in padded mode only.
    """
    if padded_mode:
        return _from_padded(permuted_tokens, sorted_indices, probs, restore_shape)
    choices = 1 if probs is None else probs.shape[1]
    return gather_rows(permuted_tokens, sorted_indices.view(-1, choices), probs)


def _from_padded(
    rows: Tensor, token: Tensor, probs: Tensor | None, restore_shape: Sequence[int]
) -> Tensor:
    token = token.reshape(-1)
    places, starts = rows_by_token(token, restore_shape[0])
    weights = None
    if probs is not None:
        expert = torch.arange(len(rows), device=rows.device) // (len(rows) // probs.shape[1])
        weights = probs[token, expert].index_select(0, places)
    return gather_rows(rows, places, weights, starts)


def check(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> None:
    """Refuse what does not fit together."""
    if padded_mode:
        if restore_shape is None:
            raise ValueError("moe_token_unpermute in padded mode needs restore_shape (T, H)")
        return
    pairs = sorted_indices.numel()
    if sorted_indices.ndim != 1 or (probs is not None and probs.numel() != pairs):
        given = None if probs is None else tuple(probs.shape)
        raise ValueError(
            "moe_token_unpermute needs sorted_indices (T * k,) and probs (T, k), got "
            f"{tuple(sorted_indices.shape)} and {given}"
        )
