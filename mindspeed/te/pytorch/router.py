"""Routing of tokens to experts: scores, choice of the best, load-balancing loss."""

from __future__ import annotations

import torch
from torch import Tensor

_EPSILON = 1e-20


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    *,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Choose `topk` experts a token.

    Args:
        logits: (tokens, experts)
        topk: experts a token.
        use_pre_softmax: normalise over all experts instead of over the chosen ones.
        num_groups: groups of neighbouring experts; with `group_topk`, limits the choice to the
            groups whose best experts score highest together.
        group_topk: groups a token may use.
        scaling_factor: factor on the probabilities.
        score_function: "softmax" or "sigmoid".
        expert_bias: (experts,), added to sigmoid scores for the choice only.

    Returns:
        Probabilities (tokens, experts), zero where not chosen, and the choice as booleans.
    """
    _check(score_function, ("softmax", "sigmoid"))
    scores = logits.float()
    if score_function == "sigmoid":
        scores = scores.sigmoid()
    elif use_pre_softmax:
        scores = scores.softmax(dim=-1)
    ranked = scores.detach()
    if expert_bias is not None and score_function == "sigmoid":
        ranked = ranked + expert_bias
    if group_topk:
        ranked = _within_best_groups(ranked, topk, num_groups or 1, group_topk)
    chosen = ranked.topk(topk, dim=-1).indices
    probs = scores.gather(-1, chosen)
    if score_function == "sigmoid" and topk > 1:
        probs = probs / (probs.sum(dim=-1, keepdim=True) + _EPSILON)
    elif score_function == "softmax" and not use_pre_softmax:
        probs = probs.softmax(dim=-1)
    if scaling_factor:
        probs = probs * scaling_factor
    spread = torch.zeros_like(logits).scatter(-1, chosen, probs.to(logits.dtype))
    return spread, _mask(logits, chosen)


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str
) -> tuple[Tensor, Tensor]:
    """Return the plain choice of experts and the normalised scores that the loss reads."""
    _check(score_function, ("softmax", "sigmoid"))
    if score_function == "softmax":
        scores = logits.float().softmax(dim=-1)
    else:
        scores = logits.float().sigmoid()
        scores = scores / (scores.sum(dim=-1, keepdim=True) + _EPSILON)
    return _mask(logits, scores.topk(topk, dim=-1).indices), scores


def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Tensor:
    """Return the load-balancing loss: high where experts with many tokens also get high scores."""
    load = probs.sum(dim=0) * tokens_per_expert
    return load.sum() * (num_experts * coeff / (topk * total_num_tokens * total_num_tokens))


def _within_best_groups(scores: Tensor, topk: int, num_groups: int, group_topk: int) -> Tensor:
    """Rule out the experts of all but the best groups."""
    groups = scores.unflatten(-1, (num_groups, -1))
    strength = groups.topk(topk // group_topk, dim=-1).values.sum(dim=-1)
    allowed = _mask(strength, strength.topk(group_topk, dim=-1).indices)
    return groups.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)


def _mask(like: Tensor, chosen: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool).scatter(-1, chosen, True)


def _check(score_function: str, known: tuple[str, ...]) -> None:
    if score_function not in known:
        raise ValueError(f"score_function={score_function!r}: use one of {', '.join(known)}")
