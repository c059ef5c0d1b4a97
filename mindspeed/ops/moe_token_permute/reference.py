"""Sort tokens by expert.

T tokens, k choices each. The T * k pairs of token and choice are sorted by expert, equal ones in
their order; row j is the token of the j-th pair. The second result tells the row of each pair.
Copies move by `token_rows`, so the gradient of a token is the sum over its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.token_rows import spread_rows


def moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the rows sorted by expert, and the row (T * k,) int32 of each pair.

    Args:
        tokens: (T, H)
        indices: (T, k) or (T,), the experts of each token. In padded mode (E, C), the token of
            each of the C places of each expert, which is what is returned then.
        num_out_tokens: how many rows to make; the last are dropped.
        padded_mode: gather by `indices` as they are.
    """
    if padded_mode:
        places, starts = rows_by_token(indices.reshape(-1), len(tokens))
        return spread_rows(tokens, places, indices.numel(), starts), indices
    pairs = indices if indices.ndim == 2 else indices.unsqueeze(1)
    places = rows_of_pairs(pairs.reshape(-1)).view(pairs.shape)
    num_rows = indices.numel()
    if num_out_tokens is not None:
        num_rows = min(num_rows, num_out_tokens)
    return spread_rows(tokens, places, num_rows), places.view(-1)


def rows_of_pairs(experts: Tensor) -> Tensor:
    """Return the rank of each pair in the stable order of experts, int32."""
    # Sorting takes a pass per byte: int32 halves the work.
    order = experts.to(torch.int32).argsort(stable=True)
    rank = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return torch.empty_like(rank).scatter_(0, order, rank)


def rows_by_token(token: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the rows in the order of their tokens, and where each token's begin."""
    token, rows = token.sort(stable=True)
    numbers = torch.arange(num_tokens + 1, device=token.device, dtype=token.dtype)
    return rows.to(torch.int32), torch.searchsorted(token, numbers)


def check(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> None:
    """Refuse tokens and indices that do not fit."""
    fits = padded_mode or (indices.ndim in (1, 2) and len(indices) == len(tokens))
    if tokens.ndim != 2 or not fits or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "moe_token_permute needs tokens (T, H) and whole numbers indices (T, k), got "
            f"{tuple(tokens.shape)} and {tuple(indices.shape)} of {indices.dtype}"
        )
    if num_out_tokens is not None and num_out_tokens < 0:
        raise ValueError(f"num_out_tokens={num_out_tokens}: give a number of rows or None for all")
