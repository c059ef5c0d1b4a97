"""Rotary position embedding in plain torch.

y = x * cos + rotate_half(x) * sin. Two channels make a pair: D / 2 apart, or neighbours
(interleaved); rotate_half maps the pair (a, b) to (-b, a). The arithmetic is float32 at least, y
has the dtype of x. Angles come as `freqs` (positions, 1 or B, 1, D); where D is smaller than the
head size, the rest of the head is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

MAX_HEAD_DIM = 896


def rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """Rotate x by tables that broadcast to it; mode 0 pairs the halves, 1 the neighbours."""
    x_acc = x.to(torch.promote_types(x.dtype, torch.float32))
    return (x_acc * cos + _rotate_half(x_acc, mode == 1) * sin).to(x.dtype)


def rotate_qk(
    q: Tensor,
    k: Tensor | None,
    freqs: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rotate (S, B, N, H) queries and keys; `positions` (S,) or (S, B) default to 0, 1, 2, ..."""
    angles = freqs[: q.shape[0]]
    if positions is not None:
        # With a position for each sequence of the batch, freqs has one entry for the whole batch.
        angles = freqs[positions] if positions.dim() == 1 else freqs[positions, 0]
    return _rotate(q, angles, interleaved), None if k is None else _rotate(k, angles, interleaved)


def rotate_qkv(
    qkv: Tensor,
    freqs: Tensor,
    sizes: Sequence[int],
    interleaved: bool = False,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split (S, B, groups, queries | key | value) into heads, and rotate queries and keys.

    `positions` are those of `rotate_qk`.
    """
    query, key, value = torch.split(qkv, list(sizes), dim=3)
    query = query.unflatten(3, (-1, key.shape[-1])).flatten(2, 3)
    rotated = rotate_qk(query, key, freqs, positions, interleaved)
    return rotated[0], cast("Tensor", rotated[1]), value


def _rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    rotated, rest = x.split([angles.shape[-1], x.shape[-1] - angles.shape[-1]], dim=-1)
    angles = angles.to(torch.promote_types(x.dtype, torch.float32))
    rotated = rotary_position_embedding(
        rotated, torch.cos(angles), torch.sin(angles), int(interleaved)
    )
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


def _rotate_half(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        pairs = x.unflatten(-1, (-1, 2))
        return torch.stack([-pairs[..., 1], pairs[..., 0]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def check_table(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> None:
    """Raise ValueError for tables that do not match x."""
    if mode not in (0, 1):
        raise ValueError(f"mode={mode}: use 0 (halves) or 1 (interleaved)")
    if x.dim() != 4 or x.shape[-1] % 2 or x.shape[-1] >= MAX_HEAD_DIM:
        raise ValueError(
            f"rotary_position_embedding needs x of 4 dimensions with an even head size below "
            f"{MAX_HEAD_DIM}, got {tuple(x.shape)}"
        )
    fits = all(n in (1, of) for n, of in zip(cos.shape, x.shape)) and cos.shape[-1] == x.shape[-1]
    if cos.shape != sin.shape or cos.dim() != 4 or not fits:
        raise ValueError(
            f"cos and sin must have one shape that broadcasts to x {tuple(x.shape)}, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )


def check_angles(
    q: Tensor,
    k: Tensor | None,
    freqs: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """Raise ValueError for angles that do not match q and k."""
    for x in (q, k):
        if x is not None and (x.dim() != 4 or x.shape[:2] != q.shape[:2]):
            raise ValueError(f"q and k must be (S, B, N, H) with one S and B, got {tuple(x.shape)}")
        if x is not None and freqs.shape[-1] > x.shape[-1]:
            raise ValueError(
                f"freqs rotates {freqs.shape[-1]} channels, the heads have {x.shape[-1]}"
            )
    _check_freqs(freqs, q.shape[1])
    if positions is None and freqs.shape[0] < q.shape[0]:
        raise ValueError(f"freqs has {freqs.shape[0]} positions, the sequence has {q.shape[0]}")


def check_packed(
    qkv: Tensor,
    freqs: Tensor,
    sizes: Sequence[int],
    interleaved: bool = False,
    positions: Tensor | None = None,
) -> None:
    """Raise ValueError for a packed tensor that does not split into whole heads."""
    if qkv.dim() != 4 or sum(sizes) != qkv.shape[-1] or sizes[1] != sizes[2]:
        raise ValueError(
            f"qkv must be (S, B, groups, queries | key | value) with a key and a value of one "
            f"size, got {tuple(qkv.shape)} to split in {list(sizes)}"
        )
    if sizes[0] % sizes[1] or freqs.shape[-1] > sizes[1]:
        raise ValueError(
            f"queries of {sizes[0]} channels and {freqs.shape[-1]} rotated channels do not fit "
            f"heads of {sizes[1]}"
        )
    _check_freqs(freqs, qkv.shape[1])
    if positions is None and freqs.shape[0] < qkv.shape[0]:
        raise ValueError(f"freqs has {freqs.shape[0]} positions, the sequence has {qkv.shape[0]}")


def _check_freqs(freqs: Tensor, batch: int) -> None:
    is_table = freqs.dim() == 4 and freqs.shape[1] in (1, batch) and freqs.shape[2] == 1
    if not is_table or freqs.shape[-1] % 2:
        raise ValueError(
            f"freqs must be (positions, 1 or {batch}, 1, an even number), got {tuple(freqs.shape)}"
        )
