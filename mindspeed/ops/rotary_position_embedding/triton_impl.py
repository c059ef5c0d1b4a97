"""Rotary position embedding in Triton: queries, keys and values of a token in one program.

A program loads the table of its token and all of its heads at once, and rotates them. Backward is
the same kernel with the sines of each pair swapped and negated. Only the table is saved.
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

# A program rotates the heads of a token, at most 4096 elements: 32 per thread, so that the table,
# which every thread loads for its channels, serves four heads.
TILE, ELEMENTS_PER_THREAD = 4096, 32

# All layers of a model rotate by the same angles: their cosines are computed once, and every layer
# saves the same tables for backward. Inside the kernel each thread would compute them again.
_tables: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Table(NamedTuple):
    """Cosines and sines as (I, J, D), of size 1 or stride 0 where they are shared."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    """Rows of the table by token, (I, J); None for row i."""
    interleaved: bool


def rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """Rotate x by tables that broadcast to it; mode 0 pairs the halves, 1 the neighbours."""
    shared = next((dim for dim in (2, 1, 0) if cos.shape[dim] == 1), None)
    is_trained = cos.requires_grad or sin.requires_grad
    if shared is None or is_trained or x.dtype == torch.float64:
        return reference.rotary_position_embedding(x, cos, sin, mode)
    cos, sin = (contiguous_heads(table).expand_as(x).select(shared, 0) for table in (cos, sin))
    (rotated,) = _Rotate.apply(Table(cos, sin, None, mode == 1), x.movedim(shared, 2))
    return rotated.movedim(2, shared)


def rotate_qk(
    q: Tensor,
    k: Tensor | None,
    freqs: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rotate (S, B, N, H) queries and keys; `positions` (S,) or (S, B) default to 0, 1, 2, ..."""
    if freqs.requires_grad or q.dtype == torch.float64:
        return reference.rotate_qk(q, k, freqs, positions, interleaved)
    table = rotation_table(q, freqs, positions, interleaved)
    if k is None:
        return _Rotate.apply(table, q)[0], None
    return _Rotate.apply(table, q, k)


def rotate_qkv(
    qkv: Tensor,
    freqs: Tensor,
    sizes: Sequence[int],
    interleaved: bool = False,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split (S, B, groups, queries | key | value) into heads, and rotate queries and keys.

    All three are new tensors: the packed one need not live until backward.
    """
    if freqs.requires_grad or qkv.dtype == torch.float64:
        return reference.rotate_qkv(qkv, freqs, sizes, interleaved, positions)
    table = rotation_table(qkv, freqs, positions, interleaved)
    return _RotatePacked.apply(table, qkv, sizes[0], sizes[1])


def _of_tokens(positions: Tensor | None, x: Tensor) -> Tensor | None:
    """Return the positions (S,) or (S, B) of the tokens of x (S, B, ...) as (S, B)."""
    if positions is None:
        return None
    positions = positions if positions.dim() == 2 else positions.unsqueeze(1)
    return positions.expand(x.shape[:2]).contiguous()


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Table, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.table = table
        return _rotate_all(table, tensors, is_forward=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_rotate_all(ctx.table, grads, is_forward=False)


class _RotatePacked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: Table, qkv: Tensor, q_size: int, head_dim: int
    ) -> tuple[Tensor, ...]:
        qkv = qkv.contiguous()
        ctx.table, ctx.shape, ctx.head_dim = table, qkv.shape, head_dim
        q_heads = q_size // head_dim
        heads = empty_heads(qkv, q_heads, head_dim)
        packed, outputs = _packed_args(qkv, head_dim), head_args(*heads)
        _launch(table, qkv.shape, (q_heads, 1, 1), head_dim, inputs=packed, outputs=outputs)
        return heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shape, head_dim = ctx.shape, ctx.head_dim
        qkv = grads[0].new_empty(shape)
        heads = (shape[3] // head_dim - 2, 1, 1)
        inputs = head_args(*(contiguous_heads(grad) for grad in grads))
        outputs = _packed_args(qkv, head_dim)
        _launch(ctx.table, shape, heads, head_dim, inputs=inputs, outputs=outputs, is_forward=False)
        return None, qkv, None, None


def _rotate_all(table: Table, tensors: Sequence[Tensor], is_forward: bool) -> tuple[Tensor, ...]:
    inputs = [contiguous_heads(x) for x in tensors]
    outputs = tuple(torch.empty_like(x) for x in inputs)
    q, *rest = inputs
    heads = (q.shape[2], rest[0].shape[2] if rest else 0, 0)
    absent = [None] * (3 - len(inputs))
    shape = (*q.shape[:2], 1, 0)
    _launch(
        table,
        shape,
        heads,
        q.shape[3],
        inputs=head_args(*inputs, *absent),
        outputs=head_args(*outputs, *absent),
        is_forward=is_forward,
    )
    return outputs


def rotation_table(
    x: Tensor, freqs: Tensor, positions: Tensor | None, interleaved: bool = False
) -> Table:
    """Return the table that rotates x (S, B, ...) by the angles of `positions`, if given."""
    positions = _of_tokens(positions, x)
    # A tensor of inference mode has no version counter that would show a change.
    if torch.compiler.is_compiling() or freqs.is_inference():
        cos, sin = _cos_sin(freqs)
        return Table(cos, sin, positions, interleaved)
    cos, sin, version = _tables.get(freqs, (None, None, -1))
    if cos is None or version != freqs._version:
        cos, sin = _cos_sin(freqs)
        _tables[freqs] = cos, sin, freqs._version
    return Table(cos, sin, positions, interleaved)


def table_args(table: Table) -> tuple[Any, ...]:
    """Return the table for a kernel: its pointers, and the strides of a position and a sequence."""
    cos, sin, positions, _ = table
    is_by_row = cos.shape[0] > 1 or positions is not None
    strides = cos.stride(0) if is_by_row else 0, cos.stride(1) if cos.shape[1] > 1 else 0
    return cos, sin, positions, *strides


def _cos_sin(freqs: Tensor) -> tuple[Tensor, Tensor]:
    angles = freqs.to(torch.float32).squeeze(2)
    return angles.cos().contiguous(), angles.sin().contiguous()


def contiguous_heads(x: Tensor) -> Tensor:
    """Return x with the channels of a head side by side, a copy if they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_heads(qkv: Tensor, q_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return new queries, keys and values for a packed tensor with q_heads queries in a group."""
    tokens, batch, groups, _ = qkv.shape
    q = qkv.new_empty(tokens, batch, groups * q_heads, head_dim)
    k = qkv.new_empty(tokens, batch, groups, head_dim)
    return q, k, torch.empty_like(k)


def head_args(*tensors: Tensor | None) -> list[Any]:
    """Return pointer and three strides of each of queries, keys and values, for a kernel."""
    args: list[Any] = []
    for x in tensors:
        args += (None, 0, 0, 0) if x is None else (x, *x.stride()[:3])
    return args


def _packed_args(qkv: Tensor, head_dim: int) -> list[Any]:
    """Return the same of a packed tensor, which the kernel takes as queries without keys."""
    return [qkv, *qkv.stride()[:2], head_dim, *head_args(None, None)]


def _launch(
    table: Table,
    shape: Sequence[int],
    heads: tuple[int, int, int],
    head_dim: int,
    *,
    inputs: list[Any],
    outputs: list[Any],
    is_forward: bool = True,
) -> None:
    """Rotate queries and keys, and copy values.

    `heads` counts the heads of queries, keys and values in each of shape[2] groups. Inputs or
    outputs without keys, where there are values, are packed.
    """
    tokens, batch, groups = shape[:3]
    if not tokens * batch:
        return
    num_heads, rotary_dim = groups * sum(heads), table.cos.shape[-1]
    tiles, constants = _constants(num_heads, heads, head_dim, rotary_dim, table.interleaved)
    has_values = heads[2] > 0
    launch(
        rotate,
        (tokens * batch, tiles),
        *inputs,
        *outputs,
        *table_args(table),
        batch,
        num_heads,
        IS_FORWARD=is_forward,
        IN_PACKED=has_values and inputs[4] is None,
        OUT_PACKED=has_values and outputs[4] is None,
        **constants,
    )


@functools.cache
def _constants(
    num_heads: int, heads: tuple[int, int, int], head_dim: int, rotary_dim: int, interleaved: bool
) -> tuple[int, dict[str, Any]]:
    block_h = block_of_heads(num_heads, head_dim)
    elements = block_h * triton.next_power_of_2(head_dim)
    constants = {
        "Q_HEADS": heads[0],
        "K_HEADS": heads[1],
        "V_HEADS": heads[2],
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "INTERLEAVED": interleaved,
        "BLOCK_PAIRS": triton.next_power_of_2(rotary_dim // 2),
        "BLOCK_REST": triton.next_power_of_2(head_dim - rotary_dim) if head_dim > rotary_dim else 0,
        "BLOCK_H": block_h,
        "num_warps": max(1, elements // (32 * ELEMENTS_PER_THREAD)),
    }
    return triton.cdiv(num_heads, block_h), constants


def block_of_heads(num_heads: int, head_dim: int, tile: int = TILE) -> int:
    """Return how many heads of a token a program takes, of at most `tile` elements."""
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(num_heads), max(1, tile // block_d))
    while block_h > 1 and 4 * block_h * triton.cdiv(num_heads, block_h) > 5 * num_heads:
        block_h //= 2  # no more than a fifth of the threads is masked out
    return block_h
