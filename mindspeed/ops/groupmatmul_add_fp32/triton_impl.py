"""Weight gradients of grouped products as one Triton kernel.

One program makes one tile of one group's product, over all rows of the group, and adds it to the
float32 result once: no atomics, no temporary. torch's grouped product writes bfloat16 only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.groupmatmul_add_fp32 import reference
from mindspeed.ops.launch import launch

_ROWS, _STAGES = 64, 3
_BLOCK = 8  # tiles
_LONG = 1024


def groupmatmul_add_fp32(
    x: Tensor, dy: Tensor, group_list: Tensor | Sequence[int], out: Tensor | Sequence[Tensor]
) -> None:
    """Add x_g^T @ dy_g to out for each group of rows."""
    if x.dtype == torch.float64:
        reference.groupmatmul_add_fp32(x, dy, group_list, out)
        return
    ends = torch.as_tensor(group_list).to(x.device, torch.int32, non_blocking=True)
    shape = (len(ends), x.shape[1], dy.shape[1])
    if isinstance(out, Tensor):
        _launch(x, dy, ends, out.view(shape), shape[1] * shape[2])
        return
    step = _even_step(out)
    if step is not None:
        _launch(x, dy, ends, out[0], step)
        return
    together = torch.zeros(shape, dtype=torch.float32, device=x.device)
    _launch(x, dy, ends, together, together.stride(0))
    torch._foreach_add_(list(out), list(together.unbind()))


def _even_step(totals: Sequence[Tensor]) -> int | None:
    """Return the distance between neighbours, which may be negative, or None if it varies.

    Megatron lays the gradients of a bucket side by side, the last parameter first. A compiler does
    not know where.
    """
    is_known = not torch.compiler.is_compiling()
    if not (is_known and all(total.is_contiguous() for total in totals)):
        return None
    places = [total.data_ptr() for total in totals]
    if len(places) == 1:
        return 0
    step = places[1] - places[0]
    is_even = all(b - a == step for a, b in zip(places, places[1:], strict=False))
    return step // totals[0].itemsize if is_even else None


def _launch(x: Tensor, dy: Tensor, ends: Tensor, first: Tensor, step: int) -> None:
    x, dy = (t if t.stride(1) == 1 else t.contiguous() for t in (x, dy))
    width, height = dy.shape[1], x.shape[1]
    if not (len(ends) and width and height):
        return
    tile_k, tile_n = _tile(x.dtype, max(height, width), len(x) // len(ends))
    grid = (triton.cdiv(height, tile_k) * triton.cdiv(width, tile_n), len(ends))
    launch(
        _add_outer,
        grid,
        x,
        dy,
        ends,
        first,
        height,
        width,
        x.stride(0),
        dy.stride(0),
        step,
        TILE_K=tile_k,
        TILE_N=tile_n,
        ROWS=_ROWS if x.itemsize == 2 else 32,
        BLOCK=_BLOCK,
        EVEN=height % tile_k == 0 and width % tile_n == 0,
        num_warps=8 if tile_n == 256 else 4,
        num_stages=_STAGES,
    )


def _tile(dtype: torch.dtype, longest: int, rows: int) -> tuple[int, int]:
    """Return the tile of a product over so many rows."""
    if longest <= 64 or dtype == torch.float32:  # no matrix unit takes exact float32
        return 64, 64
    # Long products are bound by the second-level cache: 128 x 256 sums, half the registers of 8
    # warps and 147 KiB of shared memory, read least. Short ones are bound by reading and writing
    # the result: two programs of 128 x 128 share a processor, and one multiplies meanwhile.
    return (128, 256) if rows >= _LONG else (128, 128)


@triton.jit
def _add_outer(
    x,
    dy,
    ends,
    out,
    height,
    width,
    stride_x,
    stride_dy,
    step,
    TILE_K: tl.constexpr,
    TILE_N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
):
    group = tl.program_id(1)
    # Neighbours make a block of tiles, not a line: what they read fits the second-level cache.
    tile, tiles_n = tl.program_id(0), tl.cdiv(width, TILE_N)
    k, n = tl.swizzle2d(tile // tiles_n, tile % tiles_n, tl.cdiv(height, TILE_K), tiles_n, BLOCK)
    ks = k * TILE_K + tl.arange(0, TILE_K)
    ns = n * TILE_N + tl.arange(0, TILE_N)
    end = tl.load(ends + group)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    if end <= start:
        return

    # Offsets within a block of rows stay, its place moves on: that takes the fewest registers. All
    # blocks go one way, also the last and short one: a second product, for that one alone, makes
    # the compiler wait for each instruction of the first.
    rows = tl.arange(0, ROWS)
    in_k = ks < height
    in_n = ns < width
    x_place = x + start.to(tl.int64) * stride_x
    dy_place = dy + start.to(tl.int64) * stride_dy
    x_offsets = rows[:, None] * stride_x + ks[None, :]
    dy_offsets = rows[:, None] * stride_dy + ns[None, :]
    total = tl.zeros((TILE_K, TILE_N), dtype=tl.float32)
    for done in range(0, end - start, ROWS):
        left = (rows < end - start - done)[:, None]
        if EVEN:
            a = tl.load(x_place + x_offsets, mask=left, other=0.0)
            b = tl.load(dy_place + dy_offsets, mask=left, other=0.0)
        else:
            a = tl.load(x_place + x_offsets, mask=left & in_k[None, :], other=0.0)
            b = tl.load(dy_place + dy_offsets, mask=left & in_n[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
        x_place += ROWS * stride_x
        dy_place += ROWS * stride_dy

    place = out + group.to(tl.int64) * step + ks[:, None].to(tl.int64) * width + ns[None, :]
    inside = in_k[:, None] & in_n[None, :]
    total += tl.load(place, mask=inside, other=0.0)
    tl.store(place, total, mask=inside)
