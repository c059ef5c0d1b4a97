"""Movements between tokens and rows as Triton kernels, one program a token.

A token is read once however many rows it has, and the rows of a token are summed by one program in
a fixed order: the fewest bytes, and no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.launch import launch
from mindspeed.ops.token_rows import reference
from mindspeed.ops.token_rows.contract import Moves, Places, operators


def spread(tokens: Tensor, places: Places, num_rows: int) -> Tensor:
    """Copy each token to its rows."""
    if tokens.dtype == torch.float64:
        return reference.spread(tokens, places, num_rows)
    tokens = _dense(tokens)
    rows = tokens.new_empty(num_rows, tokens.shape[1])
    if rows.numel():
        # One program more than tokens fills the rows that no token has.
        launch(
            _spread_kernel,
            (len(tokens) + 1,),
            tokens,
            rows,
            places.rows.contiguous(),
            places.starts,
            len(tokens),
            num_rows,
            tokens.shape[1],
            tokens.stride(0),
            **_shape(places, tokens.shape[1]),
        )
    return rows


def gather(rows: Tensor, places: Places, weights: Tensor | None) -> Tensor:
    """Add the rows of each token up."""
    if rows.dtype == torch.float64:
        return reference.gather(rows, places, weights)
    rows = _dense(rows)
    out = rows.new_empty(places.num_tokens, rows.shape[1])
    if out.numel():
        launch(
            _gather_kernel,
            (len(out),),
            rows,
            out,
            places.rows.contiguous(),
            places.starts,
            None if weights is None else weights.contiguous(),
            len(rows),
            rows.shape[1],
            rows.stride(0),
            **_shape(places, rows.shape[1]),
        )
    return out


def gather_backward(
    grad: Tensor, rows: Tensor, places: Places, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Send each token's gradient to its rows, and to their weights."""
    if rows.dtype == torch.float64:
        return reference.gather_backward(grad, rows, places, weights)
    grad, rows, weights = _dense(grad), _dense(rows), weights.contiguous()
    # A dropped place gets no gradient; with starts, some places may belong to no token at all.
    grad_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
    grad_weights = torch.zeros_like(weights)
    if len(grad) and grad.shape[1]:
        launch(
            _gather_backward_kernel,
            (len(grad) + 1,),
            grad,
            rows,
            grad_rows,
            grad_weights,
            places.rows.contiguous(),
            places.starts,
            weights,
            len(grad),
            len(rows),
            rows.shape[1],
            grad.stride(0),
            rows.stride(0),
            **_shape(places, rows.shape[1]),
        )
    return grad_rows, grad_weights


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _shape(places: Places, hidden: int) -> dict[str, int]:
    """A program holds a whole token, 16 to 32 numbers a thread."""
    block = triton.next_power_of_2(hidden)
    return {
        "CHOICES": 0 if places.starts is not None else places.rows.shape[1],
        "BLOCK": block,
        "num_warps": min(max(block // 512, 1), 16),
    }


@triton.jit
def _bounds(token, starts, CHOICES: tl.constexpr):
    if CHOICES > 0:
        return token * CHOICES, token * CHOICES + CHOICES
    else:
        return tl.load(starts + token).to(tl.int64), tl.load(starts + token + 1).to(tl.int64)


@triton.jit
def _fill_tail(rows, starts, num_tokens, num_rows, hidden, CHOICES: tl.constexpr, columns):
    # Rows are given out without gaps, so those that no token has are the last ones.
    if CHOICES > 0:
        first = num_tokens * CHOICES
    else:
        first = tl.load(starts + num_tokens)
    place = rows + tl.cast(first, tl.int64) * hidden + columns
    nothing = tl.zeros_like(columns).to(tl.float32).to(rows.dtype.element_ty)
    for _ in range(first, num_rows):
        tl.store(place, nothing, mask=columns < hidden)
        place += hidden


@triton.jit
def _spread_kernel(
    tokens,
    rows,
    places,
    starts,
    num_tokens,
    num_rows,
    hidden,
    stride,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    if token == num_tokens:
        _fill_tail(rows, starts, num_tokens, num_rows, hidden, CHOICES, columns)
        return
    x = tl.load(tokens + token * stride + columns, mask=inside)
    first, last = _bounds(token, starts, CHOICES)
    for index in range(first, last):
        place = tl.load(places + index).to(tl.int64)
        there = columns < tl.where(place < num_rows, hidden, 0)
        tl.store(rows + place * hidden + columns, x, mask=there)


@triton.jit
def _gather_kernel(
    rows,
    out,
    places,
    starts,
    weights,
    num_rows,
    hidden,
    stride,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    first, last = _bounds(token, starts, CHOICES)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in range(first, last):
        place = tl.load(places + index).to(tl.int64)
        there = columns < tl.where(place < num_rows, hidden, 0)
        row = tl.load(rows + place * stride + columns, mask=there, other=0.0)
        if weights is not None:
            total += row.to(tl.float32) * tl.load(weights + index).to(tl.float32)
        else:
            total += row.to(tl.float32)
    tl.store(out + token * hidden + columns, total, mask=inside)


@triton.jit
def _gather_backward_kernel(
    grad,
    rows,
    grad_rows,
    grad_weights,
    places,
    starts,
    weights,
    num_tokens,
    num_rows,
    hidden,
    stride_grad,
    stride_rows,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    if token == num_tokens:
        _fill_tail(grad_rows, starts, num_tokens, num_rows, hidden, CHOICES, columns)
        return
    inside = columns < hidden
    dy = tl.load(grad + token * stride_grad + columns, mask=inside, other=0.0).to(tl.float32)
    first, last = _bounds(token, starts, CHOICES)
    for index in range(first, last):
        place = tl.load(places + index).to(tl.int64)
        there = columns < tl.where(place < num_rows, hidden, 0)
        row = tl.load(rows + place * stride_rows + columns, mask=there, other=0.0).to(tl.float32)
        weight = tl.load(weights + index).to(tl.float32)
        tl.store(grad_rows + place * hidden + columns, dy * weight, mask=there)
        tl.store(grad_weights + index, tl.sum(dy * row))


spread_rows, gather_rows = operators(Moves(spread, gather, gather_backward))
