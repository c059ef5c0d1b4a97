"""Normed and rotated heads on Ascend: torch-npu's norm, then the rotation of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed.ops.norm import rms_norm
from mindspeed.ops.rotary_position_embedding import rotate_qk


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
    """Split (S, B, groups, queries | key | value) into heads; norm and rotate queries and keys."""
    query, key, value = torch.split(qkv, list(sizes), dim=3)
    query = query.unflatten(3, (-1, key.shape[-1])).flatten(2, 3)
    if zero_centered:
        q_weight, k_weight = q_weight.float() + 1, k_weight.float() + 1
    query, key = rms_norm(query, q_weight, eps), rms_norm(key, k_weight, eps)
    return *rotate_qk(query, key, freqs, positions), value
