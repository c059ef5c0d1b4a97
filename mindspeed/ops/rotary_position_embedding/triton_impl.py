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
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from mindspeed.ops.launch import launch
from mindspeed.ops.rotary_position_embedding import reference
from mindspeed.ops.rotary_position_embedding.kernels import rotate

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
        rotate,
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
