"""Every norm by one pair of Triton kernels.

z = dropout(x * row_scale * column_scale) + residual, rounded as it is stored, and
y = (z - mean) * r * weight + bias with r = 1 / sqrt(var + epsilon); RMS leaves the mean out.
Arithmetic is float32. Kept for backward: z, weight, the mean and r of each row, and the seed, from
which the dropout is drawn once more. Sums over rows go through one partial sum a program and a
second small kernel: no atomics, so the same bits in every run.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed.ops.launch import launch, multiprocessors
from mindspeed.ops.norm.kernels import norm_backward, norm_forward, norm_reduce

# A tile holds whole rows, about 4096 numbers: 32 a thread forward, where one tile is all a program
# does, and 16 backward, where weight and sums stay in registers too.
TILE, FORWARD_NUMBERS, BACKWARD_NUMBERS = 4096, 32, 16
LARGEST_ROW = 65536


class Plan(NamedTuple):
    """What a norm computes, beside its tensors."""

    epsilon: float
    is_rms: bool
    drop: float = 0.0
    wants_mask: bool = False
    sum_dtype: torch.dtype | None = None
    """The type of z; None where z is x itself."""


def is_served(x: Tensor) -> bool:
    """Say whether the kernels take this type and row length."""
    return x.dtype != torch.float64 and x.shape[-1] <= LARGEST_ROW


def normalise(plan: Plan, *inputs: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y, z and the mask; z is None where it is x.

    Inputs are x, residual, weight, bias, row_scale, column_scale and the seed, a number on the
    device: no host waits for it, and a graph replays it.
    """
    y, *rest = _Norm.apply(plan, *inputs)
    return y, rest[0] if rest else None, rest[1] if plan.wants_mask else None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        x, residual, weight, bias, row_scale, column_scale, seed = inputs
        width, device = x.shape[-1], x.device
        count = x.numel() // max(width, 1)
        y = torch.empty(x.shape, dtype=x.dtype, device=device)
        z = mask = None
        if plan.sum_dtype is not None:
            z = torch.empty(x.shape, dtype=plan.sum_dtype, device=device)
        if plan.wants_mask:
            mask = torch.empty(x.shape, dtype=torch.bool, device=device)
        numbers = count if plan.is_rms else 2 * count
        statistics = torch.empty(numbers, dtype=torch.float32, device=device)
        tile = _tile(width)
        if count:
            rows, stride = _rows(x)
            others, other_stride = (None, 0) if residual is None else _rows(residual)
            launch(
                norm_forward,
                (-(-count // tile.rows),),
                rows,
                others,
                weight,
                bias,
                _flat(row_scale),
                column_scale,
                seed,
                y,
                z,
                mask,
                statistics,
                count,
                width,
                stride,
                other_stride,
                plan.epsilon,
                plan.drop,
                IS_RMS=plan.is_rms,
                ROWS=tile.rows,
                BLOCK=tile.block,
                num_warps=tile.forward_warps,
            )
        ctx.plan = plan
        ctx.types = (x.dtype, None if residual is None else residual.dtype)
        scaled = x if row_scale is not None or column_scale is not None else None
        kept = x if z is None else z
        ctx.save_for_backward(kept, weight, row_scale, column_scale, seed, scaled, statistics)
        ctx.has_bias = bias is not None
        if not torch.compiler.is_compiling():  # which knows no such method
            ctx.set_materialize_grads(False)
        if mask is not None:
            ctx.mark_non_differentiable(mask)
        return tuple(x for x in (y, z, mask) if x is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, grad_z = grads[0], grads[1] if len(grads) > 1 else None
        kept, weight, row_scale, column_scale, seed, x, statistics = ctx.saved_tensors
        grad = torch.zeros_like(kept) if grad is None else grad
        width, device = kept.shape[-1], kept.device
        count = kept.numel() // max(width, 1)
        x_dtype, residual_dtype = ctx.types
        grad_x = torch.empty(kept.shape, dtype=x_dtype, device=device)
        is_mixed = seed is not None or x is not None or residual_dtype not in (None, x_dtype)
        grad_residual = None
        if residual_dtype is not None and is_mixed:
            grad_residual = torch.empty(kept.shape, dtype=residual_dtype, device=device)
        grad_rows = None if row_scale is None else torch.empty_like(row_scale)
        tile = _tile(width)
        programs = min(-(-count // tile.rows), _programs(device, tile.backward_warps))
        partial = _partial_sums(ctx, programs, width, device, column_scale)
        if count:
            rows, stride = _rows(kept)
            grad_y, grad_stride = _rows(grad)
            launch(
                norm_backward,
                (programs,),
                grad_y,
                None if grad_z is None else grad_z.contiguous(),
                rows,
                weight,
                _flat(row_scale),
                column_scale,
                seed,
                None if x is None else x.contiguous(),
                statistics,
                grad_x,
                grad_residual,
                grad_rows,
                partial,
                count,
                width,
                stride,
                grad_stride,
                ctx.plan.drop,
                IS_RMS=ctx.plan.is_rms,
                HAS_BIAS=ctx.has_bias,
                ROWS=tile.rows,
                BLOCK=tile.block,
                STAGES=_stages(tile.rows * tile.block, kept, grad, grad_z, x),
                num_warps=tile.backward_warps,
                **_registers(tile.backward_warps),
            )
        if residual_dtype is not None and not is_mixed:
            grad_residual = grad_x
        sums: list[Tensor | None] = [None, None, None]
        if partial is not None:
            sums = _reduced(partial, weight.dtype, ctx.has_bias)
        return None, grad_x, grad_residual, sums[0], sums[1], grad_rows, sums[2], None


def _partial_sums(
    ctx: Any, programs: int, width: int, device: torch.device, column_scale: Tensor | None
) -> Tensor | None:
    if not any(ctx.needs_input_grad[place] for place in (3, 4, 6)):
        return None
    count = 1 + ctx.has_bias + (column_scale is not None)
    return torch.empty((count, programs, width), dtype=torch.float32, device=device)


def _reduced(partial: Tensor, dtype: torch.dtype, has_bias: bool) -> list[Tensor | None]:
    """Add up the programs' sums: of weight, bias and column scale, None for those not there."""
    count, programs, width = partial.shape
    out = torch.empty((count, width), dtype=dtype, device=partial.device)
    # All partial sums of 16 columns at once: one trip to memory, and a program a multiprocessor.
    rows = min(512, triton.next_power_of_2(max(programs, 1)))
    launch(
        norm_reduce,
        (-(-width // 16), count),
        partial,
        out,
        programs,
        width,
        ROWS=rows,
        BLOCK=16,
        num_warps=8 if rows == 512 else 4,
    )
    if count == 1:
        return [out.view(width), None, None]
    sums: list[Tensor | None] = list(out.unbind())
    if not has_bias:
        sums.insert(1, None)
    return sums if len(sums) == 3 else [*sums, None]


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """Return x as rows, and how far apart they lie; a copy only where memory does not allow it."""
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def _flat(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.reshape(-1)


class Tile(NamedTuple):
    """What a program reads at a time: some whole rows, padded to a power of two."""

    block: int
    rows: int
    forward_warps: int
    backward_warps: int


@functools.cache
def _tile(width: int) -> Tile:
    block = max(16, triton.next_power_of_2(width))
    rows = max(1, TILE // block)
    warps = (
        min(32, max(4, rows * block // (32 * numbers)))
        for numbers in (FORWARD_NUMBERS, BACKWARD_NUMBERS)
    )
    return Tile(block, rows, *warps)


@functools.cache
def _programs(device: torch.device, warps: int) -> int:
    """Give each multiprocessor sixteen warps: the registers of backward leave room for those.

    A power of two, so that the usual numbers of rows divide evenly.
    """
    if device.type != "cuda":
        return 4  # Triton's interpreter: enough to have sums to add
    most = multiprocessors() * max(1, 16 // warps)
    return 1 << (most.bit_length() - 1)


def _registers(warps: int) -> dict[str, int]:
    """Hold a program to its share of the registers, so that sixteen warps do fit."""
    is_free = warps > 16 or torch.compiler.is_compiling()  # which does not know the option
    return {} if is_free else {"maxnreg": 128}


def _stages(numbers: int, *loaded: Tensor | None) -> int:
    """Have the next two tiles on their way while one is reduced, where shared memory holds them."""
    tile = numbers * sum(0 if tensor is None else tensor.element_size() for tensor in loaded)
    return 3 if 2 * tile <= 96 * 1024 else 1
