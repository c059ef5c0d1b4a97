"""Rotary position embedding in Triton: queries, keys and values of a token in one program.

A program reads the table of its token and all of its heads at once, and turns them. Backward is the
same kernel with the sines of each pair exchanged and negated. Only the table is kept for backward.
"""

from __future__ import annotations

import functools
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

# A program turns the heads of a token, at most 4096 numbers: 32 a thread, so that the table, which
# every thread reads for its channels, serves four heads.
TILE, NUMBERS = 4096, 32

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
        positions = positions.expand(q.shape[:2]).contiguous()
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
    return _RotatePacked.apply(_table(freqs, None, interleaved), qkv, sizes[0], sizes[1])


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Table, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.table = table
        return _turned(table, tensors, forth=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_turned(ctx.table, grads, forth=False)


class _RotatePacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Table, qkv: Tensor, of_q: int, head: int) -> tuple[Tensor, ...]:
        qkv = qkv.contiguous()
        ctx.table, ctx.shape, ctx.head = table, qkv.shape, head
        tokens, batch, groups, _ = qkv.shape
        queries = of_q // head
        q = qkv.new_empty(tokens, batch, groups * queries, head)
        k = qkv.new_empty(tokens, batch, groups, head)
        v = torch.empty_like(k)
        packed = (qkv, *qkv.stride()[:2], head)
        _launch(table, qkv.shape, (queries, 1, 1), head, _of(packed, None, None), _of(q, k, v))
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shape, head = ctx.shape, ctx.head
        qkv = grads[0].new_empty(shape)
        packed = (qkv, *qkv.stride()[:2], head)
        parts = (shape[3] // head - 2, 1, 1)
        sources = _of(*(_last_dense(grad) for grad in grads))
        _launch(ctx.table, shape, parts, head, sources, _of(packed, None, None), forth=False)
        return None, qkv, None, None


def _turned(table: Table, tensors: Sequence[Tensor], forth: bool) -> tuple[Tensor, ...]:
    sources = [_last_dense(x) for x in tensors]
    targets = tuple(torch.empty_like(x) for x in sources)
    first, *rest = sources
    parts = (first.shape[2], rest[0].shape[2] if rest else 0, 0)
    places = (_of(*heads, *[None] * (3 - len(heads))) for heads in (sources, targets))
    shape = (*first.shape[:2], 1, 0)
    _launch(table, shape, parts, first.shape[3], *places, forth=forth)
    return targets


def _table(freqs: Tensor, positions: Tensor | None, interleaved: bool) -> Table:
    # A tensor of inference mode does not tell whether it was changed.
    if torch.compiler.is_compiling() or freqs.is_inference():
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


def _of(*heads: Tensor | tuple[Any, ...] | None) -> list[Any]:
    """Describe where the heads of queries, keys and values lie: memory and three strides each."""
    described: list[Any] = []
    for x in heads:
        if isinstance(x, Tensor):
            described += (x, *x.stride()[:3])
        else:
            described += (None, 0, 0, 0) if x is None else x
    return described


def _launch(
    table: Table,
    shape: Sequence[int],
    parts: tuple[int, int, int],
    head: int,
    *places: list[Any],
    forth: bool = True,
) -> None:
    """Turn queries and keys, and copy values, from the first of two places to the second.

    `parts` are the heads of each in a group, of which there are shape[2]. A place that has queries
    alone where there are values holds the three side by side.
    """
    tokens, batch, groups = shape[:3]
    if not tokens * batch:
        return
    cos, sin, positions, interleaved = table
    slots = groups * sum(parts)
    tiles, constants = _constants(slots, parts, head, cos.shape[-1], interleaved)
    has_values = parts[2] > 0
    launch(
        _rotate,
        (tokens * batch, tiles),
        *places[0],
        *places[1],
        cos,
        sin,
        positions,
        cos.stride(0) if cos.shape[0] > 1 or positions is not None else 0,
        cos.stride(1) if cos.shape[1] > 1 else 0,
        batch,
        slots,
        FORTH=forth,
        FROM_PACKED=has_values and places[0][4] is None,
        TO_PACKED=has_values and places[1][4] is None,
        **constants,
    )


@functools.cache
def _constants(
    slots: int, parts: tuple[int, int, int], head: int, turned: int, interleaved: bool
) -> tuple[int, dict[str, Any]]:
    width = triton.next_power_of_2(head)
    tile = min(triton.next_power_of_2(slots), max(1, TILE // width))
    while tile > 1 and 4 * tile * triton.cdiv(slots, tile) > 5 * slots:
        tile //= 2  # no more than a fifth of the threads has nothing to do
    constants = {
        "Q": parts[0],
        "K": parts[1],
        "V": parts[2],
        "HEAD": head,
        "TURNED": turned,
        "INTERLEAVED": interleaved,
        "PAIRS": triton.next_power_of_2(turned // 2),
        "REST": triton.next_power_of_2(head - turned) if head > turned else 0,
        "TILE": tile,
        "num_warps": max(1, tile * width // (32 * NUMBERS)),
    }
    return triton.cdiv(slots, tile), constants


@triton.jit
def _places(
    q,
    q_i,
    q_j,
    q_n,
    k,
    k_i,
    k_j,
    k_n,
    v,
    v_i,
    v_j,
    v_n,
    i,
    j,
    slot,
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Return where each slot lies in the memory of queries, keys and values."""
    group, part = slot // (Q + K + V), slot % (Q + K + V)
    if PACKED:
        at_q = q + i * q_i + j * q_j + slot * q_n
        at_k, at_v = at_q, at_q
    else:
        at_q = q + i * q_i + j * q_j + (group * Q + part) * q_n
        at_k, at_v = at_q, at_q
        if K > 0:
            at_k = k + i * k_i + j * k_j + (group * K + part - Q) * k_n
        if V > 0:
            at_v = v + i * v_i + j * v_j + (group * V + part - Q - K) * v_n
    return at_q[:, None], at_k[:, None], at_v[:, None]


@triton.jit
def _load(at_q, at_k, at_v, channel, is_q, is_k, is_v, inside, K, V, PACKED: tl.constexpr):
    if PACKED:
        return tl.load(at_q + channel, mask=inside, other=0.0)
    value = tl.load(at_q + channel, mask=inside & is_q, other=0.0)
    if K > 0:
        value += tl.load(at_k + channel, mask=inside & is_k, other=0.0)
    if V > 0:
        value += tl.load(at_v + channel, mask=inside & is_v, other=0.0)
    return value


@triton.jit
def _store(at_q, at_k, at_v, channel, value, is_q, is_k, is_v, inside, K, V, PACKED: tl.constexpr):
    if PACKED:
        tl.store(at_q + channel, value, mask=inside)
    else:
        tl.store(at_q + channel, value, mask=inside & is_q)
        if K > 0:
            tl.store(at_k + channel, value, mask=inside & is_k)
        if V > 0:
            tl.store(at_v + channel, value, mask=inside & is_v)


@triton.jit
def _rotate(
    q,
    q_i,
    q_j,
    q_n,
    k,
    k_i,
    k_j,
    k_n,
    v,
    v_i,
    v_j,
    v_n,
    q_to,
    q_to_i,
    q_to_j,
    q_to_n,
    k_to,
    k_to_i,
    k_to_j,
    k_to_n,
    v_to,
    v_to_i,
    v_to_j,
    v_to_n,
    cos,
    sin,
    positions,
    table_i,
    table_j,
    batch,
    slots,
    FORTH: tl.constexpr,
    FROM_PACKED: tl.constexpr,
    TO_PACKED: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HEAD: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i, j = token // batch, token % batch
    slot = tl.program_id(1) * TILE + tl.arange(0, TILE)
    part = slot % (Q + K + V)
    # fmt: off
    from_q, from_k, from_v = _places(
        q, q_i, q_j, q_n, k, k_i, k_j, k_n, v, v_i, v_j, v_n, i, j, slot, Q, K, V, FROM_PACKED
    )
    to_q, to_k, to_v = _places(
        q_to, q_to_i, q_to_j, q_to_n, k_to, k_to_i, k_to_j, k_to_n, v_to, v_to_i, v_to_j, v_to_n,
        i, j, slot, Q, K, V, TO_PACKED
    )
    # fmt: on
    is_q, is_v = (part < Q)[:, None], (part >= Q + K)[:, None]
    is_k, is_slot = (part >= Q)[:, None] & (part < Q + K)[:, None], (slot < slots)[:, None]
    pair = tl.arange(0, PAIRS)
    inside = is_slot & (pair < TURNED // 2)[None, :]
    row = i if positions is None else tl.load(positions + token).to(tl.int64)
    at = row * table_i + j * table_j
    if INTERLEAVED:
        # Neighbours are read together and parted in registers: whole lines, not every other.
        both = tl.arange(0, 2 * PAIRS)
        is_both = both < TURNED
        inside = is_slot & is_both[None, :]
        read = _load(
            from_q, from_k, from_v, both[None, :], is_q, is_k, is_v, inside, K, V, FROM_PACKED
        )
        a, b = tl.split(tl.reshape(read, (TILE, PAIRS, 2)))
        c = tl.load(cos + at + both, mask=is_both, other=0.0).to(tl.float32)
        s = tl.load(sin + at + both, mask=is_both, other=0.0).to(tl.float32)
        cos_a, cos_b = tl.split(tl.reshape(c, (PAIRS, 2)))
        sin_a, sin_b = tl.split(tl.reshape(s, (PAIRS, 2)))
    else:
        lower, upper = pair[None, :], (pair + TURNED // 2)[None, :]
        a = _load(from_q, from_k, from_v, lower, is_q, is_k, is_v, inside, K, V, FROM_PACKED)
        b = _load(from_q, from_k, from_v, upper, is_q, is_k, is_v, inside, K, V, FROM_PACKED)
        is_pair = pair < TURNED // 2
        cos_a = tl.load(cos + at + pair, mask=is_pair, other=0.0).to(tl.float32)
        cos_b = tl.load(cos + at + pair + TURNED // 2, mask=is_pair, other=0.0).to(tl.float32)
        sin_a = tl.load(sin + at + pair, mask=is_pair, other=0.0).to(tl.float32)
        sin_b = tl.load(sin + at + pair + TURNED // 2, mask=is_pair, other=0.0).to(tl.float32)
    if not FORTH:
        sin_a, sin_b = -sin_b, -sin_a
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    turned_a = (wide_a * cos_a[None, :] - wide_b * sin_a[None, :]).to(a.dtype)
    turned_b = (wide_b * cos_b[None, :] + wide_a * sin_b[None, :]).to(b.dtype)
    if V > 0:
        turned_a, turned_b = tl.where(is_v, a, turned_a), tl.where(is_v, b, turned_b)
    # fmt: off
    if INTERLEAVED:
        joined = tl.reshape(tl.join(turned_a, turned_b), (TILE, 2 * PAIRS))
        _store(to_q, to_k, to_v, both[None, :], joined, is_q, is_k, is_v, inside, K, V, TO_PACKED)
    else:
        _store(to_q, to_k, to_v, lower, turned_a, is_q, is_k, is_v, inside, K, V, TO_PACKED)
        _store(to_q, to_k, to_v, upper, turned_b, is_q, is_k, is_v, inside, K, V, TO_PACKED)
    if REST > 0:
        rest = (TURNED + tl.arange(0, REST))[None, :]
        inside = is_slot & (rest < HEAD)
        kept = _load(from_q, from_k, from_v, rest, is_q, is_k, is_v, inside, K, V, FROM_PACKED)
        _store(to_q, to_k, to_v, rest, kept, is_q, is_k, is_v, inside, K, V, TO_PACKED)
    # fmt: on
