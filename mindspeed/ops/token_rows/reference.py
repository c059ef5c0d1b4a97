"""Copies between T tokens and R rows in plain torch, and what all implementations share.

`row_ids` holds the rows of each token. (T, k) are k for each token; an index of R or more is a row
that was dropped. (P,) are, for token t, those from starts[t] to starts[t + 1]; entries from
starts[T] on belong to no token. No row belongs to two tokens, and rows without a token come last.
Sums are float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class RowMap(NamedTuple):
    """The rows of each token."""

    row_ids: Tensor
    starts: Tensor | None

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return len(self.row_ids) if self.starts is None else len(self.starts) - 1


class Kernels(NamedTuple):
    """The three functions that both operators and their gradients consist of."""

    spread: Callable[[Tensor, RowMap, int], Tensor]
    """tokens (T, H) -> rows (R, H), zeros where no token has the row"""
    gather: Callable[[Tensor, RowMap, Tensor | None], Tensor]
    """rows (R, H), weights like row_ids -> tokens (T, H)"""
    gather_backward: Callable[[Tensor, Tensor, RowMap, Tensor], tuple[Tensor, Tensor]]
    """gradient of tokens (T, H), rows, weights -> gradients of rows and of weights"""


def make_operators(kernels: Kernels) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return spread_rows and gather_rows."""

    def spread_rows(
        tokens: Tensor, row_ids: Tensor, num_rows: int, starts: Tensor | None = None
    ) -> Tensor:
        """Copy each token (T, H) to its rows: (num_rows, H)."""
        return _Spread.apply(tokens, row_ids, starts, num_rows, kernels)

    def gather_rows(
        rows: Tensor, row_ids: Tensor, weights: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """Add the rows (R, H) of each token up, times their weights (like row_ids): (T, H)."""
        return _Gather.apply(rows, row_ids, starts, weights, kernels)

    return spread_rows, gather_rows


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        row_ids: Tensor,
        starts: Tensor | None,
        num_rows: int,
        kernels: Kernels,
    ) -> Tensor:
        ctx.save_for_backward(row_ids, starts)
        ctx.kernels = kernels
        return kernels.spread(tokens, RowMap(row_ids, starts), num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.kernels.gather(grad, RowMap(*ctx.saved_tensors), None), None, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        row_ids: Tensor,
        starts: Tensor | None,
        weights: Tensor | None,
        kernels: Kernels,
    ) -> Tensor:
        # Without weights the gradient does not depend on the rows, only on their number.
        ctx.save_for_backward(None if weights is None else rows, row_ids, starts, weights)
        ctx.kernels, ctx.num_rows = kernels, len(rows)
        return kernels.gather(rows, RowMap(row_ids, starts), weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, row_ids, starts, weights = ctx.saved_tensors
        row_map = RowMap(row_ids, starts)
        if weights is None:
            return ctx.kernels.spread(grad, row_map, ctx.num_rows), None, None, None, None
        grad_rows, grad_weights = ctx.kernels.gather_backward(grad, rows, row_map, weights)
        return grad_rows, None, None, grad_weights, None


def spread(tokens: Tensor, row_map: RowMap, num_rows: int) -> Tensor:
    """Copy each token to its rows."""
    return _spread(tokens.index_select(0, _safe_token(row_map)), row_map, num_rows)


def gather(rows: Tensor, row_map: RowMap, weights: Tensor | None) -> Tensor:
    """Sum the rows of each token."""
    picked = _pick(rows, row_map)
    if weights is not None:
        picked = picked * weights.reshape(-1, 1)
    acc_dtype = picked.dtype
    out = torch.zeros(row_map.num_tokens + 1, rows.shape[1], dtype=acc_dtype, device=rows.device)
    return _without_last(out.index_add_(0, _token(row_map), picked)).to(rows.dtype)


def gather_backward(
    grad: Tensor, rows: Tensor, row_map: RowMap, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of their weights."""
    copies = grad.index_select(0, _safe_token(row_map))
    copies = copies.to(torch.promote_types(grad.dtype, torch.float32))
    dots = (copies * _pick(rows, row_map)).sum(-1)
    scaled = (copies * weights.reshape(-1, 1)).to(rows.dtype)
    return _spread(scaled, row_map, len(rows)), dots.to(weights.dtype).reshape(weights.shape)


def _spread(copies: Tensor, row_map: RowMap, num_rows: int) -> Tensor:
    # Dropped entries share one row after the last.
    target = row_map.row_ids.reshape(-1).long()
    target = torch.where(_token(row_map) < row_map.num_tokens, target, num_rows)
    out = copies.new_zeros(num_rows + 1, copies.shape[1])
    return _without_last(out.index_copy_(0, target.clamp(max=num_rows), copies))


def _without_last(out: Tensor) -> Tensor:
    # Not a slice: autograd forbids in-place changes of a view that a custom Function returns, and
    # Megatron adds the output of shared experts in place.
    if torch.compiler.is_compiling():  # Dynamo does not trace resize_
        return out[:-1].clone()
    return out.resize_(len(out) - 1, out.shape[1])


def _pick(rows: Tensor, row_map: RowMap) -> Tensor:
    target = row_map.row_ids.reshape(-1).long()
    dropped = (target >= len(rows)) | (_token(row_map) >= row_map.num_tokens)
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    picked = padded.index_select(0, target.masked_fill(dropped, len(rows)))
    return picked.to(torch.promote_types(rows.dtype, torch.float32))


def _token(row_map: RowMap) -> Tensor:
    """Return the token of each entry of row_ids; entries after the last token get T."""
    number = torch.arange(row_map.row_ids.numel(), device=row_map.row_ids.device)
    if row_map.starts is None:
        return number // row_map.row_ids.shape[1]
    return torch.searchsorted(row_map.starts[1:].long().contiguous(), number, right=True)


def _safe_token(row_map: RowMap) -> Tensor:
    return _token(row_map).clamp_(max=row_map.num_tokens - 1)


spread_rows, gather_rows = make_operators(Kernels(spread, gather, gather_backward))


def check_spread(
    tokens: Tensor, row_ids: Tensor, num_rows: int, starts: Tensor | None = None
) -> None:
    """Raise ValueError for tokens and row_ids that do not match."""
    _check_row_ids(row_ids, starts)
    if tokens.ndim != 2 or len(tokens) != RowMap(row_ids, starts).num_tokens:
        raise ValueError(
            f"spread_rows needs {RowMap(row_ids, starts).num_tokens} tokens (T, H) for these "
            f"row_ids, got tokens of shape {tuple(tokens.shape)}"
        )


def check_gather(
    rows: Tensor, row_ids: Tensor, weights: Tensor | None = None, starts: Tensor | None = None
) -> None:
    """Raise ValueError for rows, row_ids and weights that do not match."""
    _check_row_ids(row_ids, starts)
    if rows.ndim != 2:
        raise ValueError(f"gather_rows needs rows (R, H), got {tuple(rows.shape)}")
    if weights is not None and weights.shape != row_ids.shape:
        raise ValueError(
            f"gather_rows needs a weight for each of row_ids {tuple(row_ids.shape)}, "
            f"got {tuple(weights.shape)}"
        )


def _check_row_ids(row_ids: Tensor, starts: Tensor | None) -> None:
    dims = 2 if starts is None else 1
    if row_ids.ndim != dims or row_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "row_ids must be integers, (T, k) or (P,) with starts, got "
            f"{tuple(row_ids.shape)} of {row_ids.dtype} and starts "
            f"{None if starts is None else tuple(starts.shape)}"
        )
