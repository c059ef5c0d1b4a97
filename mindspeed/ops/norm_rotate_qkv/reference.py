"""Normed and rotated heads of a packed qkv tensor in plain torch.

y = rotate(x / sqrt(mean(x^2) + eps) * gamma) for each head x of queries and keys: the mean is over
the channels of the head, gamma is shared by the heads. Angles and pairs of channels are those of
`rotate_qkv`, D / 2 channels apart. The arithmetic is float32 (float64 for float64 inputs), rounded
once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed.ops.norm.reference import rms_norm
from mindspeed.ops.rotary_position_embedding.reference import check_packed, rotate_qk


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

    Args:
        qkv: the packed tensor.
        q_weight: gamma of the queries' heads (H,); gamma less one if `zero_centered`.
        k_weight: the same of the keys.
        freqs: angles (positions, 1 or B, 1, D), D at most H.
        sizes: the channels of a group's queries, key and value.
        eps: added to the mean square.
        positions: rows of `freqs` by token, (S,) or (S, B); 0, 1, 2, ... by default.
        zero_centered: whether the weights are stored less one.
    """
    query, key, value = torch.split(qkv, list(sizes), dim=3)
    query = query.unflatten(3, (-1, key.shape[-1])).flatten(2, 3)
    q, k = (
        rotate_qk(_norm(x, weight, eps, zero_centered), None, freqs, positions)[0].to(qkv.dtype)
        for x, weight in ((query, q_weight), (key, k_weight))
    )
    return q, k, value


def _norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """Return the norm of x in the dtype of the arithmetic."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight = weight.to(dtype)
    return rms_norm(x.to(dtype), weight + 1 if zero_centered else weight, eps)


def check(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    freqs: Tensor,
    sizes: Sequence[int],
    eps: float = 1e-6,
    *,
    positions: Tensor | None = None,
    zero_centered: bool = False,
) -> None:
    """Raise ValueError for a packed tensor or weights that do not match heads and angles."""
    check_packed(qkv, freqs, sizes, False, positions)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.shape != (sizes[1],) or weight.dtype != q_weight.dtype:
            raise ValueError(
                f"{name} must have the {sizes[1]} channels of a head and the dtype "
                f"{q_weight.dtype}, got {tuple(weight.shape)} of {weight.dtype}"
            )
