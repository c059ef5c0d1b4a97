"""Join factors, and add the gradients of what was joined, in one launch each.

Programs share both matrices: the first ones take tiles of B, the others those of A. A tile is a
range of elements, whatever rows they are in: rows of B are as short as the ranks are small.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.adapter_factors import reference
from mindspeed.ops.adapter_factors.reference import FactorLayout, join_inner
from mindspeed.ops.dispatch import is_tracing
from mindspeed.ops.launch import launch

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_ADAPTERS = 4  # pointers that the kernels take
_BLOCK, _NUM_WARPS = 512, 4


def join_factors(
    inner: Sequence[Tensor], outer: Sequence[Tensor], layout: FactorLayout
) -> tuple[Tensor, Tensor]:
    """Return A and B of a layer from the factors of its adapters; of one, A is a view of its A."""
    factors = [*inner, *outer]
    if not _is_supported(factors, layout) or inner[0].dtype != outer[0].dtype:
        return reference.join_factors(inner, outer, layout)
    (rank, columns), count = inner[0].shape, len(inner)
    joined = outer[0].new_empty(layout.size, count * rank)
    is_copied = count > 1
    whole = joined.new_empty(count * rank, columns) if is_copied else join_inner(inner)
    tiles = triton.cdiv(joined.numel(), _BLOCK)
    tiles_each = triton.cdiv(inner[0].numel(), _BLOCK)
    launch(
        _join_factors,
        (tiles + is_copied * count * tiles_each,),
        *_padded(inner),
        *_padded(outer),
        layout.sources,
        whole,
        joined,
        inner[0].numel(),
        joined.numel(),
        tiles_each,
        tiles,
        layout.scale,
        RANK=rank,
        WIDTH=count * rank,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return whole, joined


def add_factor_gradients(
    inner: Tensor,
    outer: Tensor,
    inner_grads: Sequence[Tensor],
    outer_grads: Sequence[Tensor],
    layout: FactorLayout,
) -> None:
    """Add the gradients of A and B of a layer to those of the factors, in place and scaled."""
    grads = [*inner_grads, *outer_grads]
    if not (_is_supported(grads, layout) and _is_supported([inner, outer], layout)):
        reference.add_factor_gradients(inner, outer, inner_grads, outer_grads, layout)
        return
    rank, count = len(inner_grads[0]), len(inner_grads)
    tiles = triton.cdiv(layout.size * rank, _BLOCK)
    tiles_each = triton.cdiv(inner_grads[0].numel(), _BLOCK)
    launch(
        _add_factor_gradients,
        (tiles + count * tiles_each,),
        *_padded(inner_grads),
        *_padded(outer_grads),
        layout.sources,
        inner,
        outer,
        inner_grads[0].numel(),
        layout.size * rank,
        tiles_each,
        tiles,
        layout.scale,
        RANK=rank,
        WIDTH=count * rank,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


def _is_supported(tensors: Sequence[Tensor], layout: FactorLayout) -> bool:
    """Return whether the kernels take tensors of a layer: one dtype, contiguous, not too many."""
    first = tensors[0]
    return (
        not is_tracing()
        and len(layout.rows) <= _MAX_ADAPTERS
        and first.dtype in _DTYPES
        and all(one.dtype == first.dtype and one.is_contiguous() for one in tensors)
        and first.device == layout.sources.device
    )


def _padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [*tensors, *[tensors[0]] * (_MAX_ADAPTERS - len(tensors))]


@triton.jit
def _pick(number, ptr0, ptr1, ptr2, ptr3):
    """Return the pointer, or the pointers, of an adapter."""
    ptr = tl.where(number == 1, ptr1, ptr0)
    ptr = tl.where(number == 2, ptr2, ptr)
    return tl.where(number == 3, ptr3, ptr)


@triton.jit
def _join_factors(
    a0_ptr,
    a1_ptr,
    a2_ptr,
    a3_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    b3_ptr,
    sources_ptr,
    inner_ptr,
    outer_ptr,
    inner_size,
    outer_size,
    tiles_each,
    tiles,
    scale,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < tiles:
        offs = pid * BLOCK + tl.arange(0, BLOCK)
        mask = offs < outer_size
        source_ptrs = sources_ptr + 2 * (offs // WIDTH)
        numbers = tl.load(source_ptrs, mask=mask, other=-1)
        rows = tl.load(source_ptrs + 1, mask=mask, other=0)
        columns = offs % WIDTH - numbers * RANK
        b_ptrs = _pick(numbers, b0_ptr, b1_ptr, b2_ptr, b3_ptr) + rows * RANK + columns
        is_block = (numbers >= 0) & (columns >= 0) & (columns < RANK)
        b = tl.load(b_ptrs, mask=is_block, other=0.0).to(tl.float32) * scale
        tl.store(outer_ptr + offs, b.to(outer_ptr.dtype.element_ty), mask=mask)
    else:
        number = (pid - tiles) // tiles_each
        offs = (pid - tiles) % tiles_each * BLOCK + tl.arange(0, BLOCK)
        mask = offs < inner_size
        a = tl.load(_pick(number, a0_ptr, a1_ptr, a2_ptr, a3_ptr) + offs, mask=mask)
        tl.store(inner_ptr + number * inner_size + offs, a, mask=mask)


@triton.jit
def _add_factor_gradients(
    a0_ptr,
    a1_ptr,
    a2_ptr,
    a3_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    b3_ptr,
    sources_ptr,
    inner_ptr,
    outer_ptr,
    inner_size,
    outer_size,
    tiles_each,
    tiles,
    scale,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < tiles:
        offs = pid * BLOCK + tl.arange(0, BLOCK)
        rows, columns = offs // RANK, offs % RANK
        source_ptrs = sources_ptr + 2 * rows
        numbers = tl.load(source_ptrs, mask=offs < outer_size, other=-1)
        is_block = numbers >= 0
        b_rows = tl.load(source_ptrs + 1, mask=is_block, other=0)
        grad_ptrs = outer_ptr + rows * WIDTH + numbers * RANK + columns
        grad_b = tl.load(grad_ptrs, mask=is_block).to(tl.float32) * scale
        b_ptrs = _pick(numbers, b0_ptr, b1_ptr, b2_ptr, b3_ptr) + b_rows * RANK + columns
        _add(b_ptrs, grad_b, is_block)
    else:
        number = (pid - tiles) // tiles_each
        offs = (pid - tiles) % tiles_each * BLOCK + tl.arange(0, BLOCK)
        mask = offs < inner_size
        grad_a = tl.load(inner_ptr + number * inner_size + offs, mask=mask).to(tl.float32)
        _add(_pick(number, a0_ptr, a1_ptr, a2_ptr, a3_ptr) + offs, grad_a, mask)


@triton.jit
def _add(ptrs, values, mask):
    total = tl.load(ptrs, mask=mask).to(tl.float32) + values
    tl.store(ptrs, total.to(ptrs.dtype.element_ty), mask=mask)
