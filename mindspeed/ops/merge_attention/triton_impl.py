"""merge_attention and add_rows in Triton: every element is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.launch import launch
from mindspeed.ops.merge_attention import reference

# A program updates one head of some rows, or a range of columns of some rows: 4096 elements.
TILE, BLOCK_COLUMNS, NUM_WARPS = 4096, 512, 4


@torch.no_grad()
def merge_attention(
    out: Tensor,
    lse: Tensor,
    part: Tensor,
    part_lse: Tensor,
    rows: Tensor | None = None,
    before: Tensor | None = None,
) -> None:
    """Merge the attention of some queries to more keys into `out` and `lse`."""
    first = out if before is None else before
    tensors = (out, part, first)
    if any(x.dtype == torch.float64 or x.stride(-1) != 1 for x in tensors):
        reference.merge_attention(out, lse, part, part_lse, rows, before)
        return
    num_rows, batch, heads, head_dim = part.shape
    block_d = triton.next_power_of_2(head_dim)
    block_rows = max(1, TILE // block_d)
    if part.numel():
        launch(
            _merge_attention,
            (triton.cdiv(num_rows, block_rows), batch * heads),
            out,
            lse,
            part,
            part_lse,
            first,
            rows,
            num_rows,
            heads,
            head_dim,
            *out.stride()[:3],
            *lse.stride(),
            *part.stride()[:3],
            *part_lse.stride(),
            *first.stride()[:3],
            BLOCK_R=block_rows,
            BLOCK_D=block_d,
            num_warps=NUM_WARPS,
        )


@torch.no_grad()
def add_rows(
    total: Tensor, x: Tensor, rows: Tensor | None = None, before: Tensor | None = None
) -> None:
    """Add `x` to some rows of `total`."""
    tensors = (total, x, total if before is None else before)
    if torch.float64 in {one.dtype for one in tensors} or not total.is_contiguous():
        reference.add_rows(total, x, rows, before)
        return
    total, x, first = (one.contiguous() for one in tensors)
    num_columns = total[:1].numel()
    if rows is None and x.numel():
        tiles = (triton.cdiv(x.numel(), TILE),)
        launch(_add_all_rows, tiles, total, x, first, x.numel(), BLOCK=TILE, num_warps=NUM_WARPS)
    elif x.numel():
        block_rows = TILE // BLOCK_COLUMNS
        grid = triton.cdiv(len(x), block_rows), triton.cdiv(num_columns, BLOCK_COLUMNS)
        launch(
            _add_rows,
            grid,
            total,
            x,
            rows,
            len(x),
            num_columns,
            BLOCK_R=block_rows,
            BLOCK_C=BLOCK_COLUMNS,
            num_warps=NUM_WARPS,
        )


@triton.jit
def _merge_attention(
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    first_ptr,
    rows_ptr,
    num_rows,
    num_heads,
    head_dim,
    out_stride_s,
    out_stride_b,
    out_stride_n,
    lse_stride_b,
    lse_stride_n,
    lse_stride_s,
    part_stride_s,
    part_stride_b,
    part_stride_n,
    part_lse_stride_b,
    part_lse_stride_n,
    part_lse_stride_s,
    first_stride_s,
    first_stride_b,
    first_stride_n,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = at < num_rows
    row = at
    if rows_ptr is not None:
        row = tl.load(rows_ptr + at, mask=is_row, other=0)
    b = (tl.program_id(1) // num_heads).to(tl.int64)
    n = (tl.program_id(1) % num_heads).to(tl.int64)
    lse_ptrs = lse_ptr + b * lse_stride_b + n * lse_stride_n + row * lse_stride_s
    part_lse_ptrs = part_lse_ptr + b * part_lse_stride_b + n * part_lse_stride_n
    lse1 = tl.load(lse_ptrs, mask=is_row, other=0.0)
    lse2 = tl.load(part_lse_ptrs + at * part_lse_stride_s, mask=is_row, other=0.0)
    largest = tl.maximum(lse1, lse2)
    # Without keys so far and now, both are -inf: subtract something finite.
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    share, rest = tl.exp(lse1 - finite), tl.exp(lse2 - finite)
    total = share + rest
    inverse = 1.0 / tl.where(total > 0.0, total, 1.0)
    # Every warp has loaded all rows: none may overwrite what another has yet to load.
    tl.debug_barrier()
    tl.store(lse_ptrs, tl.log(total) + finite, mask=is_row)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask = is_row[:, None] & (offs_d < head_dim)
    out_ptrs = out_ptr + b * out_stride_b + n * out_stride_n
    out_ptrs += row[:, None] * out_stride_s + offs_d
    part_ptrs = part_ptr + b * part_stride_b + n * part_stride_n
    part_ptrs += at[:, None] * part_stride_s + offs_d
    first_ptrs = first_ptr + b * first_stride_b + n * first_stride_n
    first_ptrs += row[:, None] * first_stride_s + offs_d
    before = tl.load(first_ptrs, mask=mask, other=0.0).to(tl.float32)
    part = tl.load(part_ptrs, mask=mask, other=0.0).to(tl.float32)
    merged = before * (share * inverse)[:, None] + part * (rest * inverse)[:, None]
    tl.store(out_ptrs, merged, mask=mask)


@triton.jit
def _add_rows(
    total_ptr,
    x_ptr,
    rows_ptr,
    num_rows,
    num_columns,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    mask = (at < num_rows)[:, None] & (columns < num_columns)
    row = tl.load(rows_ptr + at, mask=at < num_rows, other=0)
    total_ptrs = total_ptr + row[:, None] * num_columns + columns
    x = tl.load(x_ptr + at[:, None] * num_columns + columns, mask=mask, other=0.0)
    total = tl.load(total_ptrs, mask=mask, other=0.0)
    tl.store(total_ptrs, total + x.to(total.dtype), mask=mask)


@triton.jit
def _add_all_rows(total_ptr, x_ptr, first_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(first_ptr + at, mask=at < size, other=0.0)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0)
    dtype = total_ptr.dtype.element_ty
    tl.store(total_ptr + at, first.to(dtype) + x.to(dtype), mask=at < size)
