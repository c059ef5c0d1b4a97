"""decode_attention in Triton: rotation, cache update and attention in one launch.

A program has a row and a head of keys, and all queries that share it: keys and values are read once
and only as far as the row goes. Where rows are few and the cache is long, the keys are split among
programs, and a second launch merges what these have found.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from mindspeed.ops.decode_attention import reference
from mindspeed.ops.decode_attention.kernels import decode, merge
from mindspeed.ops.decode_attention.reference import Pair
from mindspeed.ops.launch import launch, multiprocessors

TILE_BYTES = 16 * 1024  # of keys, and as many of values: three of each are in flight
MIN_QUERIES = 16  # the smallest tile of a tensor core
MIN_SPLIT, MAX_SPLITS = 512, 64  # keys of a split, so that merging is the smaller part
MAX_HEAD_DIM = 256


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Pair,
    position: Tensor,
    *,
    scale: float,
    first: Tensor | None = None,
    rotary: Pair | None = None,
) -> Tensor:
    """Write a key and value a row to the cache, and return the attention (B, G, N, H) to it."""
    rows, groups, queries, size = q.shape
    if q.dtype == torch.float64 or size > MAX_HEAD_DIM:
        return reference.decode_attention(
            q, k, v, cache, position, scale=scale, first=first, rotary=rotary
        )
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    cos, sin = (None, None) if rotary is None else (table.contiguous() for table in rotary)
    out = q.new_empty(q.shape)
    splits = _num_splits(rows * groups, len(cache[0]), q.device.type)
    parts, tops, totals = out, None, None
    if splits > 1:
        parts = q.new_empty(*q.shape[:3], splits, size, dtype=torch.float32)
        tops, totals = (torch.empty_like(parts[..., 0]) for _ in range(2))
    launch(
        decode,
        (rows, groups, splits),
        *(q, *q.stride()[:3], k, *k.stride()[:2], v, *v.stride()[:2]),
        *(argument for memory in cache for argument in (memory, *memory.stride()[:3])),
        *(cos, sin, size),
        *(position, 0 if position.shape[0] == 1 else position.stride(0)),
        *(None if first is None else first.contiguous(), parts, tops, totals, scale),
        **_constants(queries, size, splits, cache[0].element_size()),
    )
    if splits > 1:
        launch(
            merge,
            (rows * groups * queries,),
            *(parts, tops, totals, out),
            HEAD_DIM=size,
            SPLITS=splits,
            BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_D=triton.next_power_of_2(size),
        )
    return out


def _num_splits(programs: int, capacity: int, device: str) -> int:
    """Return how many programs share the keys of a row: more than one while some would idle."""
    most = 2 * (multiprocessors() if device == "cuda" else 4)  # Triton's interpreter has none
    return max(1, min(most // programs, capacity // MIN_SPLIT, MAX_SPLITS))


@functools.cache
def _constants(queries: int, size: int, splits: int, element_size: int) -> dict[str, Any]:
    block_d = max(16, triton.next_power_of_2(size))
    return {
        "NUM_QUERIES": queries,
        "HEAD_DIM": size,
        "SPLITS": splits,
        "BLOCK_N": max(MIN_QUERIES, triton.next_power_of_2(queries)),
        "BLOCK_D": block_d,
        "BLOCK_T": max(16, TILE_BYTES // (block_d * element_size)),
        "num_warps": 4,
        "num_stages": 3,
    }
