"""What moves between T tokens and R rows, whoever moves it.

`places` says which rows a token has. (T, k) are k for each token; a place of R or more stands for a
row that was dropped. (P,) are, for token t, those from starts[t] to starts[t + 1]; places from
starts[T] on belong to none. No row belongs to two tokens, and rows without a token come last. Sums
are float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Places(NamedTuple):
    """Which rows each token has."""

    rows: Tensor
    starts: Tensor | None

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return len(self.rows) if self.starts is None else len(self.starts) - 1


class Moves(NamedTuple):
    """The three movements that make up both operators and their gradients."""

    spread: Callable[[Tensor, Places, int], Tensor]
    """tokens (T, H) -> rows (R, H), zeros where no token has the row"""
    gather: Callable[[Tensor, Places, Tensor | None], Tensor]
    """rows (R, H), weights like places -> tokens (T, H)"""
    gather_backward: Callable[[Tensor, Tensor, Places, Tensor], tuple[Tensor, Tensor]]
    """gradient of tokens (T, H), rows, weights -> gradients of rows and of weights"""


def operators(moves: Moves) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Make spread_rows and gather_rows."""

    def spread_rows(
        tokens: Tensor, places: Tensor, num_rows: int, starts: Tensor | None = None
    ) -> Tensor:
        """Copy each token (T, H) to its rows: (num_rows, H)."""
        return _Spread.apply(tokens, places, starts, num_rows, moves)

    def gather_rows(
        rows: Tensor, places: Tensor, weights: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """Add the rows (R, H) of each token up, times their weights (like places): (T, H)."""
        return _Gather.apply(rows, places, starts, weights, moves)

    return spread_rows, gather_rows


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, places: Tensor, starts: Tensor | None, num_rows: int, moves: Moves
    ) -> Tensor:
        ctx.save_for_backward(places, starts)
        ctx.moves = moves
        return moves.spread(tokens, Places(places, starts), num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.moves.gather(grad, Places(*ctx.saved_tensors), None), None, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        places: Tensor,
        starts: Tensor | None,
        weights: Tensor | None,
        moves: Moves,
    ) -> Tensor:
        # Without weights the gradient needs no rows: only their number.
        ctx.save_for_backward(None if weights is None else rows, places, starts, weights)
        ctx.moves, ctx.num_rows = moves, len(rows)
        return moves.gather(rows, Places(places, starts), weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, places, starts, weights = ctx.saved_tensors
        where = Places(places, starts)
        if weights is None:
            return ctx.moves.spread(grad, where, ctx.num_rows), None, None, None, None
        grad_rows, grad_weights = ctx.moves.gather_backward(grad, rows, where, weights)
        return grad_rows, None, None, grad_weights, None


def check_spread(
    tokens: Tensor, places: Tensor, num_rows: int, starts: Tensor | None = None
) -> None:
    """Refuse tokens and places that do not fit."""
    _check_places(places, starts)
    if tokens.ndim != 2 or len(tokens) != Places(places, starts).num_tokens:
        raise ValueError(
            f"spread_rows needs a token for each of {Places(places, starts).num_tokens} lists of "
            f"places, got tokens of shape {tuple(tokens.shape)}"
        )


def check_gather(
    rows: Tensor, places: Tensor, weights: Tensor | None = None, starts: Tensor | None = None
) -> None:
    """Refuse rows, places and weights that do not fit."""
    _check_places(places, starts)
    if rows.ndim != 2:
        raise ValueError(f"gather_rows needs rows (R, H), got {tuple(rows.shape)}")
    if weights is not None and weights.shape != places.shape:
        raise ValueError(
            f"gather_rows needs a weight for each of the places {tuple(places.shape)}, "
            f"got {tuple(weights.shape)}"
        )


def _check_places(places: Tensor, starts: Tensor | None) -> None:
    dims = 2 if starts is None else 1
    if places.ndim != dims or places.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "places must be whole numbers, (T, k) or (P,) with starts, got "
            f"{tuple(places.shape)} of {places.dtype} and starts "
            f"{None if starts is None else tuple(starts.shape)}"
        )
