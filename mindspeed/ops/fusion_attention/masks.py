"""Which keys a query sees, and what is added to its scores."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.fusion_attention.contract import Options

Band = tuple[int, int, int]
"""How many keys before and after a query are seen, and the key at which the first query sits."""


def band(options: Options, num_q: int, num_k: int, mode: int) -> Band | None:
    """Return the band of keys that a mode leaves, None where it leaves all."""
    below, above = options.pre_tokens, options.next_tokens
    if mode == 0:
        return (below, above, 0)
    if mode == 2:
        return (num_q + num_k, 0, 0)
    if mode in (3, 5, 6):
        return (num_q + num_k, 0, num_k - num_q)
    return (below, above, num_k - num_q) if mode == 4 else None


def mode_of(options: Options, document: int, count: int) -> int:
    """Return the mode of one document: 7 and 8 treat the last and the first apart."""
    mode = options.sparse_mode
    if mode == 7:
        return 4 if document == count - 1 else 3
    if mode == 8:
        return 4 if document == 0 else 2
    return mode


def visible(q: Tensor, k: Tensor, options: Options, mode: int, first: int = 0) -> Tensor | None:
    """Return what (B, N, S, D) queries see, broadcast to (B, N, S, S), None for all.

    `first` is the number of the first sequence, by which prefix is looked up.
    """
    mask = options.atten_mask
    if mask is None:
        return None
    num_q, num_k = q.shape[-2], k.shape[-2]
    seen = None
    edges = band(options, num_q, num_k, mode)
    if edges is not None:
        below, above, start = edges
        ahead = torch.arange(num_k, device=q.device) - start
        ahead = ahead - torch.arange(num_q, device=q.device).unsqueeze(1)
        seen = (ahead <= above) & (ahead >= -below)
    if mode in (0, 1):
        allowed = ~mask.bool()[..., :num_q, :num_k]
        seen = allowed if seen is None else seen & allowed
    if mode in (5, 6) and options.prefix is not None:
        lengths = torch.tensor(list(options.prefix), device=q.device)[first : first + len(q)]
        start_of_all = torch.arange(num_k, device=q.device) < lengths.view(-1, 1, 1, 1)
        seen = start_of_all if seen is None else seen | start_of_all
    return seen


def position_bias(q: Tensor, k: Tensor, options: Options, wide: torch.dtype) -> Tensor | None:
    """Return what is added to the scaled scores, broadcast to (B, N, S, S)."""
    pse = options.pse
    if pse is None:
        return None
    if options.pse_type in (0, 1):
        if pse.shape[-2] not in (1, q.shape[-2]):
            raise ValueError(
                f"pse of shape {tuple(pse.shape)} must have 1 or {q.shape[-2]} rows, all of them"
            )
        return pse.to(wide) * (options.scale if options.pse_type == 1 else 1.0)
    starts = ((given or [0])[0] for given in (options.q_start_idx, options.kv_start_idx))
    of_q, of_k = (
        torch.arange(x.shape[-2], device=q.device) + start for x, start in zip((q, k), starts)
    )
    distance = (of_q.unsqueeze(1) - of_k).abs().to(wide)
    distance = distance.sqrt() if options.pse_type == 3 else distance
    return -pse.to(wide).reshape(-1, q.shape[1], 1, 1) * distance
