"""The choice of experts in plain torch, in float32 (float64 for float64 logits).

T tokens, E experts, k of them for each token. Scores are softmax(logits) or sigmoid(logits).

    chosen    the k experts with the highest logits (with a bias: sigmoid scores + bias), the lower
              expert first among equals; with groups, out of `group_topk` groups of neighbours
    groups    those whose k // group_topk highest sum to most: sigmoid scores + bias, softmax scores
              with use_pre_softmax, else logits
    probs     softmax of the chosen logits, or the chosen scores with use_pre_softmax; sigmoid: the
              chosen scores over their sum (unchanged for k = 1); times scaling_factor
    scores    of all experts; sigmoid: over their sum
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-20
"""Added to a sum of sigmoid scores, as Megatron does."""
SCORE_FUNCTIONS = ("softmax", "sigmoid")


class Routing(NamedTuple):
    """The experts of each token."""

    probs: Tensor
    """(T, E) of the logits' dtype, zero where not chosen"""
    chosen: Tensor
    """(T, E) booleans, k of them in each row"""
    scores: Tensor | None
    """(T, E) float32, for a load-balancing loss, if asked for"""


def router_topk(
    logits: Tensor,
    topk: int,
    *,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias: Tensor | None = None,
    with_scores: bool = False,
) -> Routing:
    """Choose `topk` experts for each token.

    Args:
        logits: (T, E)
        topk: experts of a token.
        score_function: "softmax" or "sigmoid".
        use_pre_softmax: softmax over all experts instead of over the chosen ones.
        num_groups: groups of neighbouring experts; without `group_topk` of no effect.
        group_topk: groups that a token may use.
        scaling_factor: factor on the probabilities.
        expert_bias: (E,), added to sigmoid scores for the choice only.
        with_scores: return the scores of all experts.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_sigmoid = score_function == "sigmoid"
    values = x.sigmoid() if is_sigmoid else x.softmax(-1) if use_pre_softmax else x
    ranked, strength = x.detach(), values.detach()
    if is_sigmoid and expert_bias is not None:
        ranked = strength = strength + expert_bias
    if group_topk:
        allowed = _best_groups(strength, topk, num_groups or 1, group_topk)
        ranked = ranked.masked_fill(~allowed, float("-inf"))
    ids = _highest(ranked, topk)
    probs = values.gather(-1, ids)
    if is_sigmoid and topk > 1:
        probs = probs / (probs.sum(-1, keepdim=True) + EPSILON)
    elif not is_sigmoid and not use_pre_softmax:
        probs = probs.softmax(-1)
    if scaling_factor:
        probs = probs * scaling_factor
    dense = torch.zeros_like(x).scatter(-1, ids, probs).to(logits.dtype)
    return Routing(dense, _mask(x, ids), _normalised(x, is_sigmoid) if with_scores else None)


def _normalised(x: Tensor, is_sigmoid: bool) -> Tensor:
    if not is_sigmoid:
        return x.softmax(-1)
    scores = x.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + EPSILON)


def _highest(values: Tensor, count: int) -> Tensor:
    """Return the positions of the highest values, the first ones among equals.

    torch.topk takes any of them, and not the same on every device.
    """
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _best_groups(scores: Tensor, topk: int, num_groups: int, group_topk: int) -> Tensor:
    """Return a mask (T, E) of the experts of the groups whose best experts sum to most."""
    groups = scores.unflatten(-1, (num_groups, -1))
    strength = groups.topk(topk // group_topk, dim=-1).values.sum(-1)
    allowed = _mask(strength, _highest(strength, group_topk))
    return allowed.unsqueeze(-1).expand_as(groups).flatten(-2)


def _mask(like: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool).scatter(-1, ids, True)


def check(
    logits: Tensor,
    topk: int,
    *,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias: Tensor | None = None,
    with_scores: bool = False,
) -> None:
    """Raise ValueError for logits and options that do not match."""
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(
            f"router_topk needs logits (T, E), got {tuple(logits.shape)} of {logits.dtype}"
        )
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(
            f"score_function={score_function!r}: use one of {', '.join(SCORE_FUNCTIONS)}"
        )
    num_experts = logits.shape[1]
    if not 1 <= topk <= num_experts:
        raise ValueError(f"topk={topk}: choose from 1 to all {num_experts} experts")
    if expert_bias is not None and expert_bias.shape != (num_experts,):
        raise ValueError(
            f"expert_bias of shape {tuple(expert_bias.shape)}: give one number for each of "
            f"{num_experts} experts"
        )
    if group_topk:
        _check_groups(num_experts, topk, num_groups or 1, group_topk)


def _check_groups(num_experts: int, topk: int, num_groups: int, group_topk: int) -> None:
    if num_experts % num_groups or group_topk > num_groups:
        raise ValueError(
            f"num_groups={num_groups}, group_topk={group_topk}: choose at most as many groups as "
            f"there are, and a number of groups that divides {num_experts} experts"
        )
    size = num_experts // num_groups
    if not 1 <= topk // group_topk <= size or topk > group_topk * size:
        raise ValueError(
            f"topk={topk} experts cannot come from group_topk={group_topk} groups of {size}: "
            f"choose a topk from {group_topk} to {group_topk * size}"
        )
