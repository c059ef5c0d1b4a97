"""The choice of groups of experts by a given number of their best scores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def wrap_group_limited_topk(original: Callable[..., Any], counted: int) -> Callable[..., Any]:
    """Score a group by the sum of its `counted` best experts, not of its topk // group_topk."""

    @functools.wraps(original)
    def group_limited_topk(
        scores: Tensor,
        topk: int,
        num_tokens: int,
        num_experts: int,
        num_groups: int,
        group_topk: int,
    ) -> tuple[Tensor, Tensor]:
        groups = scores.view(num_tokens, num_groups, num_experts // num_groups)
        best = groups.topk(min(counted, groups.shape[-1]), dim=-1).values.sum(-1)
        rows = torch.topk(best, k=group_topk, dim=-1, sorted=False).indices
        is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, rows, True)
        allowed = groups.masked_fill(~is_chosen.unsqueeze(-1), float("-inf")).view_as(scores)
        weights, experts = torch.topk(allowed, k=topk, dim=-1)
        return weights, experts

    return group_limited_topk
