"""Copies between tokens and rows as Triton kernels, one program per token.

A token is read once however many rows it has, and the rows of a token are summed by one program in
a fixed order: the least memory traffic, and no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.launch import launch
from mindspeed.ops.token_rows import reference
from mindspeed.ops.token_rows.reference import Kernels, RowMap, make_operators


def spread(tokens: Tensor, row_map: RowMap, num_rows: int) -> Tensor:
    """Copy each token to its rows."""
    if tokens.dtype == torch.float64:
        return reference.spread(tokens, row_map, num_rows)
    tokens = _contiguous_rows(tokens)
    rows = tokens.new_empty(num_rows, tokens.shape[1])
    if rows.numel():
        # One program more than tokens zeroes the rows that no token has.
        launch(
            _spread_kernel,
            (len(tokens) + 1,),
            tokens,
            rows,
            row_map.row_ids.contiguous(),
            row_map.starts,
            len(tokens),
            num_rows,
            tokens.shape[1],
            tokens.stride(0),
            **_constants(row_map, tokens.shape[1]),
        )
    return rows


def gather(rows: Tensor, row_map: RowMap, weights: Tensor | None) -> Tensor:
    """Sum the rows of each token."""
    if rows.dtype == torch.float64:
        return reference.gather(rows, row_map, weights)
    rows = _contiguous_rows(rows)
    out = rows.new_empty(row_map.num_tokens, rows.shape[1])
    if out.numel():
        launch(
            _gather_kernel,
            (len(out),),
            rows,
            out,
            row_map.row_ids.contiguous(),
            row_map.starts,
            None if weights is None else weights.contiguous(),
            len(rows),
            rows.shape[1],
            rows.stride(0),
            **_constants(row_map, rows.shape[1]),
        )
    return out


def gather_backward(
    grad: Tensor, rows: Tensor, row_map: RowMap, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of their weights."""
    if rows.dtype == torch.float64:
        return reference.gather_backward(grad, rows, row_map, weights)
    grad, rows, weights = _contiguous_rows(grad), _contiguous_rows(rows), weights.contiguous()
    # A dropped row gets no gradient; with starts, some entries may belong to no token at all.
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
            row_map.row_ids.contiguous(),
            row_map.starts,
            weights,
            len(grad),
            len(rows),
            rows.shape[1],
            grad.stride(0),
            rows.stride(0),
            **_constants(row_map, rows.shape[1]),
        )
    return grad_rows, grad_weights


def _contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _constants(row_map: RowMap, hidden: int) -> dict[str, int]:
    """Return the kernels' constants: a program holds a token, 16 to 32 elements per thread."""
    block = triton.next_power_of_2(hidden)
    return {
        "TOP_K": 0 if row_map.starts is not None else row_map.row_ids.shape[1],
        "BLOCK_H": block,
        "num_warps": min(max(block // 512, 1), 16),
    }


@triton.jit
def _token_bounds(token, starts_ptr, TOP_K: tl.constexpr):
    if TOP_K > 0:
        return token * TOP_K, token * TOP_K + TOP_K
    else:
        start, end = tl.load(starts_ptr + token), tl.load(starts_ptr + token + 1)
        return start.to(tl.int64), end.to(tl.int64)


@triton.jit
def _zero_tail(rows_ptr, starts_ptr, num_tokens, num_rows, H, TOP_K: tl.constexpr, offs_h):
    # Rows are assigned without gaps, so those that no token has are the last ones.
    if TOP_K > 0:
        first = num_tokens * TOP_K
    else:
        first = tl.load(starts_ptr + num_tokens)
    row_ptrs = rows_ptr + tl.cast(first, tl.int64) * H + offs_h
    zeros = tl.zeros_like(offs_h).to(tl.float32).to(rows_ptr.dtype.element_ty)
    for _ in range(first, num_rows):
        tl.store(row_ptrs, zeros, mask=offs_h < H)
        row_ptrs += H


@triton.jit
def _spread_kernel(
    tokens_ptr,
    rows_ptr,
    row_ids_ptr,
    starts_ptr,
    num_tokens,
    num_rows,
    H,
    stride_tokens,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_H)
    mask = offs_h < H
    if token == num_tokens:
        _zero_tail(rows_ptr, starts_ptr, num_tokens, num_rows, H, TOP_K, offs_h)
        return
    x = tl.load(tokens_ptr + token * stride_tokens + offs_h, mask=mask)
    start, end = _token_bounds(token, starts_ptr, TOP_K)
    for index in range(start, end):
        row_id = tl.load(row_ids_ptr + index).to(tl.int64)
        row_mask = offs_h < tl.where(row_id < num_rows, H, 0)
        tl.store(rows_ptr + row_id * H + offs_h, x, mask=row_mask)


@triton.jit
def _gather_kernel(
    rows_ptr,
    out_ptr,
    row_ids_ptr,
    starts_ptr,
    weights_ptr,
    num_rows,
    H,
    stride_rows,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_H)
    mask = offs_h < H
    start, end = _token_bounds(token, starts_ptr, TOP_K)
    acc = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for index in range(start, end):
        row_id = tl.load(row_ids_ptr + index).to(tl.int64)
        row_mask = offs_h < tl.where(row_id < num_rows, H, 0)
        row = tl.load(rows_ptr + row_id * stride_rows + offs_h, mask=row_mask, other=0.0)
        if weights_ptr is not None:
            acc += row.to(tl.float32) * tl.load(weights_ptr + index).to(tl.float32)
        else:
            acc += row.to(tl.float32)
    tl.store(out_ptr + token * H + offs_h, acc, mask=mask)


@triton.jit
def _gather_backward_kernel(
    grad_ptr,
    rows_ptr,
    grad_rows_ptr,
    grad_weights_ptr,
    row_ids_ptr,
    starts_ptr,
    weights_ptr,
    num_tokens,
    num_rows,
    H,
    stride_grad,
    stride_rows,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_H)
    if token == num_tokens:
        _zero_tail(grad_rows_ptr, starts_ptr, num_tokens, num_rows, H, TOP_K, offs_h)
        return
    mask = offs_h < H
    dy = tl.load(grad_ptr + token * stride_grad + offs_h, mask=mask, other=0.0).to(tl.float32)
    start, end = _token_bounds(token, starts_ptr, TOP_K)
    for index in range(start, end):
        row_id = tl.load(row_ids_ptr + index).to(tl.int64)
        row_mask = offs_h < tl.where(row_id < num_rows, H, 0)
        row = tl.load(rows_ptr + row_id * stride_rows + offs_h, mask=row_mask, other=0.0)
        row = row.to(tl.float32)
        weight = tl.load(weights_ptr + index).to(tl.float32)
        tl.store(grad_rows_ptr + row_id * H + offs_h, dy * weight, mask=row_mask)
        tl.store(grad_weights_ptr + index, tl.sum(dy * row))


spread_rows, gather_rows = make_operators(Kernels(spread, gather, gather_backward))
