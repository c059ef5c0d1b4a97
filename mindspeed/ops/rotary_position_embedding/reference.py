"""Rotary position embedding in plain torch.

y = x * cos + turn(x) * sin. Two channels make a pair: D / 2 apart, or neighbours (interleaved);
turn takes the pair (a, b) to (-b, a). The arithmetic is float32 at least, y has the dtype of x.
Angles come as `freqs` (positions, 1 or B, 1, D); where D is smaller than the head, the rest of the
head stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """Turn x by tables that broadcast to it; mode 0 pairs the halves, 1 the neighbours."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    turned = wide * cos + _quarter_turn(wide, mode == 1) * sin
    return turned.to(x.dtype)


def rotate_qk(
    q: Tensor,
    k: Tensor | None,
    freqs: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Turn (S, B, N, H) queries and keys; `positions` (S,) or (S, B) default to 0, 1, 2, ..."""
    angles = freqs[: q.shape[0]]
    if positions is not None:
        # With a position for each sequence of the batch, freqs has one entry for the batch.
        angles = freqs[positions] if positions.dim() == 1 else freqs[positions, 0]
    return _rotate(q, angles, interleaved), None if k is None else _rotate(k, angles, interleaved)


def rotate_qkv(
    qkv: Tensor, freqs: Tensor, sizes: Sequence[int], interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split (S, B, groups, queries | key | value) into heads, and turn queries and keys."""
    query, key, value = torch.split(qkv, list(sizes), dim=3)
    query = query.reshape(*query.shape[:2], -1, key.shape[-1])
    query, key = rotate_qk(query, key, freqs, interleaved=interleaved)
    return query, key, value


def _rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    turned, kept = x.split([angles.shape[-1], x.shape[-1] - angles.shape[-1]], dim=-1)
    angles = angles.to(torch.promote_types(x.dtype, torch.float32))
    turned = rotary_position_embedding(
        turned, torch.cos(angles), torch.sin(angles), int(interleaved)
    )
    return torch.cat([turned, kept], dim=-1) if kept.shape[-1] else turned


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        pairs = x.unflatten(-1, (-1, 2))
        return torch.stack([-pairs[..., 1], pairs[..., 0]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
