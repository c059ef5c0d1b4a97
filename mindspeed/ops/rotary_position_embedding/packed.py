"""Rotary embedding of packed sequences: positions restart at every document."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.packed_batch import describe, register
from mindspeed.ops.rotary_position_embedding import rotate_qk


def rotate_packed(t: Tensor, freqs: Tensor, cu_seqlens: Tensor, interleaved: bool) -> Tensor:
    """Rotate (T, N, H) by the angles freqs (positions, 1, 1, D)."""
    positions = _shared_positions(t, cu_seqlens)
    return rotate_qk(t.unsqueeze(1), None, freqs, positions, interleaved)[0].squeeze(1)


def _shared_positions(t: Tensor, cu_seqlens: Tensor) -> Tensor:
    known = describe(cu_seqlens)
    if known.positions is not None:
        return known.positions
    positions = known.computed_positions
    if positions is None or len(positions) != len(t):
        positions = packed_positions(t, cu_seqlens)
        register(cu_seqlens, computed_positions=positions)
    return positions


def packed_positions(
    t: Tensor,
    cu_seqlens: Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    start_positions: Tensor | None = None,
) -> Tensor:
    """Return the position of each token of (T, ...) in its document.

    `cu_seqlens` are those before documents are split over context-parallel ranks, which hold two
    chunks of each; `start_positions` (B,) shifts every document.
    """
    bounds = cu_seqlens.to(t.device, torch.int64) // cp_size
    token = torch.arange(t.shape[0], device=t.device)
    document = torch.searchsorted(bounds, token, right=True) - 1
    # Tokens after the last document are padding: they stay at position zero.
    local = torch.where(token < bounds[-1], token - bounds[document], 0)
    if cp_size > 1:
        lengths = torch.diff(bounds, append=bounds[-1:])[document]
        chunk = lengths // 2
        mirrored = lengths * cp_size - (cp_rank + 2) * chunk + local
        local = torch.where(local < chunk, cp_rank * chunk + local, mirrored)
    if start_positions is not None:
        local = local + torch.cat([start_positions, start_positions.new_zeros(1)])[document]
    return local


def document_positions(t: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """Return the positions of the tokens of (T, ...) in their documents, None without documents."""
    return None if cu_seqlens is None else _shared_positions(t, cu_seqlens)
