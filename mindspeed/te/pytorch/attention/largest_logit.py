"""The largest attention score of each head, which QK-clipping keeps below a threshold.

torch's fused attention does not tell it, so the scores are computed once more, without gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.te.pytorch.attention.core import Documents
from mindspeed.te.pytorch.attention.masks import MaskRule, MaskTensors, visible_keys


def largest_in_batch(
    q: Tensor,
    k: Tensor,
    rule: MaskRule,
    scale: float,
    *,
    mask: MaskTensors = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return (N,) for (S, B, N, H) queries and keys."""
    visible = visible_keys(mask, rule.kind) if rule.reads_mask else None
    q, k = (x.permute(1, 2, 0, 3) for x in (q, k))
    return _largest(q, k, rule, scale, visible=visible, bias=bias)


def largest_in_documents(
    q: Tensor, k: Tensor, rule: MaskRule, scale: float, *, of_q: Documents, of_k: Documents
) -> Tensor:
    """Return (N,) for packed (T, N, H) queries and keys, of which each document sees itself."""
    largest = []
    for rows, columns in zip(of_q.slices(), of_k.slices(), strict=True):
        one_q, one_k = (x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[columns]))
        largest.append(_largest(one_q, one_k, rule, scale))
    return torch.stack(largest).amax(0)


@torch.no_grad()
def _largest(
    q: Tensor,
    k: Tensor,
    rule: MaskRule,
    scale: float,
    *,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias
    for allowed in (visible, rule.visible_band(q.shape[-2], k.shape[-2], q.device)):
        if allowed is not None:
            scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.amax((0, 2, 3))
