"""Normed and rotated heads of a packed qkv tensor in Triton: one kernel each way.

A program takes the same heads of many tokens, and loads those of the next tokens while it works on
one. Forward reduces, scales, rotates and writes them to queries, keys or values; in backward each
row of a program adds up the gradient of one weight. Backward keeps the packed tensor alone and
computes the norms again. Sums over programs are added in a fixed order: no atomics.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed.ops.launch import launch, multiprocessors
from mindspeed.ops.norm.triton_impl import add_partial_sums
from mindspeed.ops.norm_rotate_qkv import reference
from mindspeed.ops.norm_rotate_qkv.kernels import norm_rotate, norm_rotate_backward
from mindspeed.ops.rotary_position_embedding.triton_impl import (
    Table,
    block_of_heads,
    contiguous_heads,
    empty_heads,
    head_args,
    rotation_table,
    table_args,
)

ELEMENTS_PER_THREAD = 16  # two loads of 16 bytes in bfloat16
TILE = 1024  # elements of a program: of 512 to 4096 the fastest on an H200, both ways
# Sixteen warps fit on a multiprocessor; in backward with so many registers per thread.
WARPS, REGISTERS = 16, 128
STAGES = 3  # prefetch the next two tokens while one is reduced


def norm_rotate_qkv(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    freqs: Tensor,
    sizes: Sequence[int],
    eps: float = 1e-6,
    *,
    positions: Tensor | None = None,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split (S, B, groups, queries | key | value) into heads; norm and rotate queries and keys.

    All three are new tensors.
    """
    if freqs.requires_grad or qkv.dtype == torch.float64:
        return reference.norm_rotate_qkv(
            *(qkv, q_weight, k_weight, freqs, sizes, eps),
            positions=positions,
            zero_centered=zero_centered,
        )
    table = rotation_table(qkv, freqs, positions)
    spec = _Spec(sizes[0] // sizes[1], sizes[1], float(eps), zero_centered)
    return _NormRotate.apply(table, spec, qkv, q_weight, k_weight)


class _Spec(NamedTuple):
    """The arguments of the kernels beside tensors."""

    q_heads: int
    """Heads of queries in a group; it has one of keys and one of values."""
    head_dim: int
    eps: float
    zero_centered: bool


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: Table, spec: _Spec, qkv: Tensor, q_weight: Tensor, k_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv.contiguous()
        tokens, batch, groups, _ = qkv.shape
        q, k, v = empty_heads(qkv, spec.q_heads, spec.head_dim)
        ctx.table, ctx.spec = table, spec
        ctx.save_for_backward(qkv, q_weight, k_weight)
        if tokens * batch:
            num_heads = groups * (spec.q_heads + 2)
            blocks = _blocks(num_heads, spec.head_dim, table.cos.shape[-1])
            launch(
                norm_rotate,
                (min(tokens * batch, _num_programs(qkv.device, blocks)), blocks.tiles),
                *(qkv, q_weight, k_weight),
                *head_args(q, k, v),
                *table_args(table),
                *(tokens * batch, batch, num_heads, spec.eps),
                **_constants(spec, blocks, table),
                num_warps=blocks.num_warps,
            )
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight = ctx.saved_tensors
        table, spec = ctx.table, ctx.spec
        tokens, batch, groups, _ = qkv.shape
        num_heads = groups * (spec.q_heads + 2)
        blocks = _blocks(num_heads, spec.head_dim, table.cos.shape[-1])
        programs = min(tokens * batch, _num_programs(qkv.device, blocks))
        grad_qkv = torch.empty_like(qkv)
        partial = None
        if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
            shape = (2, programs * blocks.tiles, spec.head_dim)
            partial = torch.empty(shape, dtype=torch.float32, device=qkv.device)
        if programs:
            launch(
                norm_rotate_backward,
                (programs, blocks.tiles),
                *(qkv, q_weight, k_weight),
                *head_args(*(contiguous_heads(grad) for grad in grads)),
                *table_args(table),
                *(grad_qkv, partial, tokens * batch, batch, num_heads, spec.eps),
                **_constants(spec, blocks, table),
                num_warps=blocks.num_warps,
                **_max_registers(blocks),
            )
        if partial is None:
            return None, None, grad_qkv, None, None
        return None, None, grad_qkv, *add_partial_sums(partial, q_weight.dtype).unbind()


class _Blocks(NamedTuple):
    """How the heads of a token are distributed over programs."""

    block_h: int
    tiles: int
    num_warps: int
    pairs: int
    rest: int


@functools.cache
def _blocks(num_heads: int, head_dim: int, rotary_dim: int) -> _Blocks:
    block_h = block_of_heads(num_heads, head_dim, TILE)
    elements = block_h * triton.next_power_of_2(head_dim)
    rest = head_dim - rotary_dim
    return _Blocks(
        block_h,
        triton.cdiv(num_heads, block_h),
        max(1, elements // (32 * ELEMENTS_PER_THREAD)),
        triton.next_power_of_2(rotary_dim // 2),
        triton.next_power_of_2(rest) if rest else 0,
    )


def _num_programs(device: torch.device, blocks: _Blocks) -> int:
    """Return over how many programs the tokens are distributed: as many as run at once."""
    if device.type != "cuda":
        return 4  # Triton's interpreter: enough to have partial sums to add
    return max(1, multiprocessors() * WARPS // (blocks.num_warps * blocks.tiles))


def _max_registers(blocks: _Blocks) -> dict[str, int]:
    """Limit the registers of a thread; channels in three parts would spill to memory."""
    is_unlimited = blocks.rest or torch.compiler.is_compiling()  # which does not know the option
    return {} if is_unlimited else {"maxnreg": REGISTERS}


def _constants(spec: _Spec, blocks: _Blocks, table: Table) -> dict[str, Any]:
    return {
        "Q_HEADS": spec.q_heads,
        "HEAD_DIM": spec.head_dim,
        "ROTARY_DIM": table.cos.shape[-1],
        "ZERO_CENTERED": spec.zero_centered,
        "BLOCK_PAIRS": blocks.pairs,
        "BLOCK_REST": blocks.rest,
        "BLOCK_H": blocks.block_h,
        "NUM_STAGES": STAGES,
    }
