"""Rotary position embedding.

`freqs` holds the angle of every position and channel, (positions, 1 or B, 1, D); where D is smaller
than the head size, the rest of the head stays as it is. A channel is paired with the one D / 2
further on or, interleaved, with its neighbour. The arithmetic is float32 at least, and the result
has the dtype of the input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.rotary_position_embedding import rotate_qk, rotate_qkv
from mindspeed.ops.rotary_position_embedding.packed import packed_positions, rotate_packed


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    *,
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotate t: (S, B, N, H), (B, S, N, H) or packed (T, N, H).

    Packed tokens count from the start of their document. `cu_seqlens` are the documents' bounds
    before they are split over context-parallel ranks: a rank holds pieces cp_rank and
    2 * cp_size - 1 - cp_rank of each. `start_positions` (B,) shifts every sequence. `fused` asks
    for a kernel; the numbers are the same.
    """
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise ValueError("tensor_format=thd needs cu_seqlens")
        if cp_size == 1 and start_positions is None:
            return rotate_packed(t, freqs, cu_seqlens, interleaved)
        packed = packed_positions(t, cu_seqlens, cp_size, cp_rank, start_positions)
        return rotate_qk(t.unsqueeze(1), None, freqs, packed, interleaved)[0].squeeze(1)
    if tensor_format not in ("sbhd", "bshd"):
        raise ValueError(f"tensor_format={tensor_format} is not known: use sbhd, bshd or thd")
    if tensor_format == "bshd":
        t = t.transpose(0, 1)
    positions = None
    if start_positions is not None:
        positions = torch.arange(t.shape[0], device=t.device).unsqueeze(1) + start_positions
    out = rotate_qk(t, None, freqs, positions, interleaved)[0]
    return out.transpose(0, 1) if tensor_format == "bshd" else out


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: list[int],
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split (S, B, groups, queries | key | value) and rotate queries and keys; heads come third."""
    if q_freqs is k_freqs:
        return rotate_qkv(qkv, q_freqs, qkv_split_arg_list, interleaved)
    query, key, value = torch.split(qkv, qkv_split_arg_list, dim=3)
    query = query.reshape(*query.shape[:2], -1, key.shape[-1])
    query = apply_rotary_pos_emb(query, q_freqs, interleaved=interleaved)
    return query, apply_rotary_pos_emb(key, k_freqs, interleaved=interleaved), value
