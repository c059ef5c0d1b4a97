"""Rotary position embedding in Triton: queries, keys and values of a token in one program.

A program reads the table of its token once and turns every head by it. Backward is the same
kernel with the sines of each pair exchanged and negated. Only the table is kept for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from mindspeed.ops.launch import launch
from mindspeed.ops.rotary_position_embedding import reference

# About 4096 numbers in registers at a time, 32 a thread.
TILE, WARPS = 4096, 4

# All layers of a model turn by the same angles: their cosines are computed once, and every layer
# keeps the same tables for backward. Inside the kernel each thread would compute them again.
_tables: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Table(NamedTuple):
    """Cosines and sines as (I, J, D), of size 1 or stride 0 where they do not change."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    """Rows of the table by token, (I, J); None for row i."""
    interleaved: bool


class Heads(NamedTuple):
    """Heads of all tokens in somebody's memory, in groups; where they are read or written."""

    memory: Tensor
    strides: tuple[int, int, int, int]
    """Between tokens along I and J, between groups, and between the heads of a group."""


class Move(NamedTuple):
    """Heads to be turned, or only copied, from one memory to another."""

    source: Heads
    target: Heads
    count: int
    group: int


def rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """Turn x by tables that broadcast to it; mode 0 pairs the halves, 1 the neighbours."""
    shared = next((dim for dim in (2, 1, 0) if cos.shape[dim] == 1), None)
    is_learned = cos.requires_grad or sin.requires_grad
    if shared is None or is_learned or x.dtype == torch.float64:
        return reference.rotary_position_embedding(x, cos, sin, mode)
    cos, sin = (_last_dense(table).expand_as(x).select(shared, 0) for table in (cos, sin))
    (turned,) = _Rotate.apply(Table(cos, sin, None, mode == 1), x.movedim(shared, 2))
    return turned.movedim(2, shared)


def rotate_qk(
    q: Tensor,
    k: Tensor | None,
    freqs: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Turn (S, B, N, H) queries and keys; `positions` (S,) or (S, B) default to 0, 1, 2, ..."""
    if freqs.requires_grad or q.dtype == torch.float64:
        return reference.rotate_qk(q, k, freqs, positions, interleaved)
    if positions is not None:
        positions = positions if positions.dim() == 2 else positions.unsqueeze(1)
        positions = positions.expand(q.shape[:2])
    table = _table(freqs, positions, interleaved)
    if k is None:
        return _Rotate.apply(table, q)[0], None
    return _Rotate.apply(table, q, k)


def rotate_qkv(
    qkv: Tensor, freqs: Tensor, sizes: Sequence[int], interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split (S, B, groups, queries | key | value) into heads, and turn queries and keys.

    All three are written anew: the packed tensor need not live on until backward.
    """
    if freqs.requires_grad or qkv.dtype == torch.float64:
        return reference.rotate_qkv(qkv, freqs, sizes, interleaved)
    return _RotatePacked.apply(_table(freqs, None, interleaved), qkv, tuple(sizes))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Table, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.table = table
        return _Rotate.turned(table, tensors, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Rotate.turned(ctx.table, grads, -1.0)

    @staticmethod
    def turned(table: Table, tensors: Sequence[Tensor], direction: float) -> tuple[Tensor, ...]:
        sources = [_last_dense(x) for x in tensors]
        targets = tuple(torch.empty_like(x) for x in sources)
        moves = [Move(_heads(x, 1), _heads(y, 1), x.shape[2], 1) for x, y in zip(sources, targets)]
        _launch(table, moves, sources[0].shape, direction)
        return targets


class _RotatePacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Table, qkv: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        qkv = _last_dense(qkv)
        ctx.table, ctx.sizes, ctx.shape = table, sizes, qkv.shape
        groups, head = qkv.shape[2], sizes[1]
        parts = tuple(qkv.new_empty(*qkv.shape[:2], groups * size // head, head) for size in sizes)
        moves = [
            Move(packed, _heads(part, size // head), part.shape[2], size // head)
            for packed, part, size in zip(_packed(qkv, sizes), parts, sizes)
        ]
        _launch(table, moves, parts[0].shape, 1.0)
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_qkv = grads[0].new_empty(ctx.shape)
        head = ctx.sizes[1]
        moves = [
            Move(_heads(_last_dense(grad), size // head), packed, grad.shape[2], size // head)
            for packed, grad, size in zip(_packed(grad_qkv, ctx.sizes), grads, ctx.sizes)
        ]
        _launch(ctx.table, moves, grads[0].shape, -1.0)
        return None, grad_qkv, None


def _table(freqs: Tensor, positions: Tensor | None, interleaved: bool) -> Table:
    if torch.compiler.is_compiling():
        return Table(*_cos_sin(freqs), positions, interleaved)
    known, version = _tables.get(freqs, (None, -1))
    if known is None or version != freqs._version:
        known = _cos_sin(freqs)
        _tables[freqs] = known, freqs._version
    return Table(*known, positions, interleaved)


def _cos_sin(freqs: Tensor) -> tuple[Tensor, Tensor]:
    angles = freqs.to(torch.float32).squeeze(2)
    return angles.cos().contiguous(), angles.sin().contiguous()


def _last_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _heads(x: Tensor, group: int) -> Heads:
    i, j, n, _ = x.stride()
    return Heads(x, (i, j, n * group, n))


def _packed(qkv: Tensor, sizes: tuple[int, ...]) -> list[Heads]:
    i, j, g, _ = qkv.stride()
    return [Heads(part, (i, j, g, sizes[1])) for part in torch.split(qkv, sizes, dim=3)]


def _launch(table: Table, moves: list[Move], shape: torch.Size, direction: float) -> None:
    """Turn the first two moves, queries and keys of (I, J, N, H); copy a third, the values."""
    tokens, batch, _, head = shape
    turned = table.cos.shape[-1]
    if not tokens * batch:
        return
    described: list[Any] = []
    for move in moves:
        described += [move.source.memory, move.target.memory, move.count, move.group]
        described += [*move.source.strides, *move.target.strides]
    described += [None, None, *[0] * 10] * (3 - len(moves))
    step, apart = (2, 1) if table.interleaved else (1, turned // 2)
    positions = table.positions
    fits = max(1, TILE // triton.next_power_of_2(head))
    tiles = [min(fits, triton.next_power_of_2(move.count)) for move in moves]
    launch(
        _rotate,
        (tokens * batch,),
        *described,
        table.cos,
        table.sin,
        positions,
        0 if table.cos.shape[0] == 1 and positions is None else table.cos.stride(0),
        0 if table.cos.shape[1] == 1 else table.cos.stride(1),
        *((0, 0) if positions is None else positions.stride()),
        batch,
        turned // 2,
        head,
        direction,
        STEP=step,
        APART=apart,
        PAIRS=triton.next_power_of_2(turned // 2),
        REST=triton.next_power_of_2(head - turned) if head > turned else 0,
        Q_TILE=tiles[0],
        K_TILE=tiles[-1],
        num_warps=WARPS,
    )


@triton.jit
def _move(
    source,
    target,
    count,
    group,
    s_group,
    s_head,
    t_group,
    t_head,
    cos_a,
    sin_a,
    cos_b,
    sin_b,
    pairs,
    head_size,
    STEP: tl.constexpr,
    APART: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    TILE: tl.constexpr,
    TURNS: tl.constexpr,
):
    pair = tl.arange(0, PAIRS)
    channel = (pair * STEP)[None, :]
    for first in range(0, count, TILE):
        head = first + tl.arange(0, TILE)
        is_head = (head < count)[:, None]
        inside = is_head & (pair < pairs)[None, :]
        s_at = source + ((head // group) * s_group + (head % group) * s_head)[:, None]
        t_at = target + ((head // group) * t_group + (head % group) * t_head)[:, None]
        if STEP == 2:
            # Neighbours are read together and parted in registers: whole lines, not every other.
            both = tl.arange(0, 2 * PAIRS)[None, :]
            inside = is_head & (both < 2 * pairs)
            read = tl.load(s_at + both, mask=inside, other=0.0)
            a, b = tl.split(tl.reshape(read, (TILE, PAIRS, 2)))
        else:
            a = tl.load(s_at + channel, mask=inside, other=0.0)
            b = tl.load(s_at + channel + APART, mask=inside, other=0.0)
        if TURNS:
            wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
            a = (wide_a * cos_a - wide_b * sin_a).to(a.dtype)
            b = (wide_b * cos_b + wide_a * sin_b).to(b.dtype)
        if STEP == 2:
            tl.store(t_at + both, tl.reshape(tl.join(a, b), (TILE, 2 * PAIRS)), mask=inside)
        else:
            tl.store(t_at + channel, a, mask=inside)
            tl.store(t_at + channel + APART, b, mask=inside)
        if REST > 0:
            rest = 2 * pairs + tl.arange(0, REST)[None, :]
            inside = is_head & (rest < head_size)
            tl.store(t_at + rest, tl.load(s_at + rest, mask=inside), mask=inside)


@triton.jit
def _rotate(
    q,
    q_to,
    q_count,
    q_in_group,
    q_i,
    q_j,
    q_group,
    q_head,
    q_to_i,
    q_to_j,
    q_to_group,
    q_to_head,
    k,
    k_to,
    k_count,
    k_in_group,
    k_i,
    k_j,
    k_group,
    k_head,
    k_to_i,
    k_to_j,
    k_to_group,
    k_to_head,
    v,
    v_to,
    v_count,
    v_in_group,
    v_i,
    v_j,
    v_group,
    v_head,
    v_to_i,
    v_to_j,
    v_to_group,
    v_to_head,
    cos,
    sin,
    positions,
    table_i,
    table_j,
    position_i,
    position_j,
    batch,
    pairs,
    head_size,
    direction,
    STEP: tl.constexpr,
    APART: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
):
    i = (tl.program_id(0) // batch).to(tl.int64)
    j = (tl.program_id(0) % batch).to(tl.int64)
    row = i
    if positions is not None:
        row = tl.load(positions + i * position_i + j * position_j).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    is_pair = pair < pairs
    at = row * table_i + j * table_j + pair * STEP
    cos_a = tl.load(cos + at, mask=is_pair, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + at + APART, mask=is_pair, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + at, mask=is_pair, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + at + APART, mask=is_pair, other=0.0).to(tl.float32)
    # direction is 1 or -1; backward takes the other sine of the pair, negated.
    forth_a = tl.where(direction > 0, sin_a, -sin_b)[None, :]
    forth_b = tl.where(direction > 0, sin_b, -sin_a)[None, :]
    cos_a, cos_b = cos_a[None, :], cos_b[None, :]
    # fmt: off
    _move(
        q + i * q_i + j * q_j, q_to + i * q_to_i + j * q_to_j, q_count, q_in_group,
        q_group, q_head, q_to_group, q_to_head, cos_a, forth_a, cos_b, forth_b,
        pairs, head_size, STEP, APART, PAIRS, REST, Q_TILE, True,
    )
    if k is not None:
        _move(
            k + i * k_i + j * k_j, k_to + i * k_to_i + j * k_to_j, k_count, k_in_group,
            k_group, k_head, k_to_group, k_to_head, cos_a, forth_a, cos_b, forth_b,
            pairs, head_size, STEP, APART, PAIRS, REST, K_TILE, True,
        )
    if v is not None:
        _move(
            v + i * v_i + j * v_j, v_to + i * v_to_i + j * v_to_j, v_count, v_in_group,
            v_group, v_head, v_to_group, v_to_head, cos_a, forth_a, cos_b, forth_b,
            pairs, head_size, STEP, APART, PAIRS, REST, K_TILE, False,
        )
    # fmt: on
