"""draw_tokens in plain torch.

The probabilities of a row, one after the other, divide the numbers from 0 to 1 into shares. The
token is the one whose share the point of the row falls into: nothing waits for the host. First a
span of tokens is found, then a token of it, as a running sum over a whole row is slow on a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SPAN = 128
"""Tokens whose probabilities are added up before one of them is chosen."""


def check(logits: Tensor, points: Tensor, temperature: float = 1.0) -> None:
    """Raise ValueError for points that do not match the logits, and for no temperature."""
    if logits.dim() != 2 or points.shape != (len(logits), 1):
        raise ValueError(
            f"logits {tuple(logits.shape)} and points {tuple(points.shape)}: use (rows, vocabulary)"
            " and (rows, 1)"
        )
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: use a positive one")


def draw_tokens(logits: Tensor, points: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return a token of each row and its log-probability, in float32 at least.

    Args:
        logits: (rows, vocabulary); tokens of minus infinity are never drawn.
        points: (rows, 1), numbers from 0 to 1.
        temperature: logits are divided by it first.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    probs = (logits if temperature == 1 else logits / temperature).softmax(-1)
    if missing := -probs.shape[-1] % SPAN:
        probs = F.pad(probs, (0, missing))
    spans = probs.unflatten(-1, (-1, SPAN))
    tokens = tokens_at(points, spans, spans.sum(-1).cumsum(-1))
    return tokens, probs.gather(-1, tokens[:, None]).squeeze(-1).log()


def tokens_at(points: Tensor, spans: Tensor, totals: Tensor) -> Tensor:
    """Return the token of each row at a point (rows, 1) of the probabilities (rows, spans, SPAN).

    `totals` are the running sums of the spans (rows, spans).
    """
    points = points * totals[:, -1:]
    index = _share_of(points, totals, spans.sum(-1))
    begin = F.pad(totals, (1, 0)).gather(1, index)
    span = spans.gather(1, index[..., None].expand(-1, -1, SPAN)).squeeze(1)
    return (index * SPAN + _share_of(points - begin, span.cumsum(-1), span)).squeeze(-1)


def _share_of(points: Tensor, totals: Tensor, widths: Tensor) -> Tensor:
    """Return the share that each point falls into (rows, 1), of those that are not empty."""
    index = torch.searchsorted(totals, points, right=True).clamp(max=totals.shape[-1] - 1)
    # Running sums are rounded, each by itself on a GPU: they may grow where nothing is added.
    numbers = torch.arange(totals.shape[-1], device=totals.device)
    last = torch.where(widths > 0, numbers, -1).cummax(-1).values.gather(1, index)
    return torch.where(last >= 0, last, (widths > 0).int().argmax(-1, keepdim=True))
