"""decode_attention in plain torch.

B rows, G heads of keys and values, N heads of queries for each of them, H head size, T positions in
the cache.

The new queries and keys are rotated by the angles of their position, y = x * cos + rotate_half(x) *
sin, and rounded to their dtype. The new key and value are written to the cache. The queries of row
b then attend to the keys from first[b] to position[b], the new one among them. Nothing is read from
the rest of the cache, which may hold anything. The softmax is float32 at least.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.dispatch import refuse_gradient
from mindspeed.ops.rotary_position_embedding.reference import rotary_position_embedding

Pair = tuple[Tensor, Tensor]


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Pair,
    position: Tensor,
    *,
    scale: float,
    first: Tensor | None = None,
    rotary: Pair | None = None,
) -> None:
    """Raise ValueError for tensors that do not match each other, or that need a gradient."""
    refuse_gradient("decode_attention", (q, k, v))
    if q.dim() != 4 or (*q.shape[:2], *q.shape[3:]) != k.shape or v.shape != k.shape:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: use (B, G, N, H) and "
            "twice (B, G, H)"
        )
    rows, groups, size = k.shape
    for memory in cache:
        if memory.dim() != 4 or memory.shape[1:] != k.shape or memory.stride(-1) != 1:
            raise ValueError(
                f"the cache is {tuple(memory.shape)}: use (T, {rows}, {groups}, {size}), where a "
                "head is contiguous"
            )
    if position.shape not in ((1,), (rows,)) or first is not None and first.shape != (rows,):
        raise ValueError(f"position has to be (1,) or ({rows},), and first ({rows},)")
    if rotary is not None and any(table.shape != (len(cache[0]), size) for table in rotary):
        raise ValueError(
            f"cos and sin are {', '.join(str(tuple(t.shape)) for t in rotary)}: use "
            f"({len(cache[0])}, {size}), positions of the cache by head size"
        )


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
    """Write a key and value a row to the cache, and return the attention (B, G, N, H) to it.

    Args:
        q: (B, G, N, H)
        k: (B, G, H)
        v: (B, G, H)
        cache: keys and values (T, B, G, H), changed in place.
        position: (1,) or (B,), where the new token of a row is; not known to the host.
        scale: of the scores.
        first: (B,), the first key that a row attends to; 0 by default.
        rotary: cosines and sines (T, H) by which queries and keys are rotated.
    """
    keys, values = cache
    position = position.expand(len(q))
    if rotary is not None:
        cos, sin = (table[position][:, None, None] for table in rotary)
        q, k = (rotary_position_embedding(x, cos, sin) for x in (q, k.unsqueeze(2)))
        k = k.squeeze(2)
    rows = torch.arange(len(q), device=q.device)
    keys[position, rows] = k.to(keys.dtype)
    values[position, rows] = v.to(values.dtype)
    wide = torch.promote_types(q.dtype, torch.float32)
    index = torch.arange(len(keys), device=q.device)[:, None]
    is_hidden = index > position
    if first is not None:
        is_hidden = is_hidden | (index < first)
    scores = torch.einsum("bgnh,tbgh->tbgn", q.to(wide), keys.to(wide)) * scale
    weights = scores.masked_fill(is_hidden[..., None, None], -torch.inf).softmax(0)
    seen = values.to(wide).masked_fill(is_hidden[..., None, None], 0.0)
    return torch.einsum("tbgn,tbgh->bgnh", weights, seen).to(q.dtype)
