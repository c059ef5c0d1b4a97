"""Routing of tokens to experts: scores, choice of the best, load-balancing loss."""

from __future__ import annotations

from torch import Tensor

from mindspeed.ops.router_topk import router_topk


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
    """Choose `topk` experts a token, as mindspeed.ops.router_topk says.

    Returns:
        Probabilities (tokens, experts), zero where not chosen, and the choice as booleans.
    """
    routing = router_topk(
        logits,
        topk,
        score_function=score_function,
        use_pre_softmax=use_pre_softmax,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
        expert_bias=expert_bias,
    )
    return routing.probs, routing.chosen


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str
) -> tuple[Tensor, Tensor]:
    """Return the plain choice of experts and the normalised scores that the loss reads."""
    routing = router_topk(logits, topk, score_function=score_function, with_scores=True)
    return routing.chosen, routing.scores


def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Tensor:
    """Return the load-balancing loss: high where experts with many tokens also get high scores."""
    # The gradient of the sum is one row, expanded, and is read as such.
    load = probs.sum(dim=0) * tokens_per_expert
    return load.sum() * (num_experts * coeff / (topk * total_num_tokens * total_num_tokens))
