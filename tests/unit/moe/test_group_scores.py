"""Groups of experts by their best scores: a loop over tokens, and Megatron's own rule."""

import pytest
import torch

from mindspeed.moe.group_scores import wrap_group_limited_topk


def plain(scores, topk, num_groups, group_topk, counted):
    """Return the experts of every token, one token and one group after the other."""
    found, size = [], scores.shape[1] // num_groups
    for row in scores.tolist():
        groups = [sorted(row[n * size : (n + 1) * size], reverse=True) for n in range(num_groups)]
        strength = [sum(group[:counted]) for group in groups]
        best = sorted(range(num_groups), key=lambda n: -strength[n])[:group_topk]
        experts = [expert for expert in range(len(row)) if expert // size in best]
        found.append(sorted(sorted(experts, key=lambda expert: -row[expert])[:topk]))
    return found


def chosen(function, scores, topk, num_groups, group_topk):
    sizes = {"num_tokens": scores.shape[0], "num_experts": scores.shape[1]}
    weights, experts = function(
        scores=scores, topk=topk, num_groups=num_groups, group_topk=group_topk, **sizes
    )
    assert torch.equal(weights, scores.gather(1, experts))
    return experts.sort(-1).values.tolist()


@pytest.mark.parametrize("counted", [1, 2])
@pytest.mark.parametrize(("topk", "num_groups", "group_topk"), [(6, 8, 3), (2, 4, 3), (4, 4, 2)])
def test_groups_are_chosen_by_their_best_scores(counted, topk, num_groups, group_topk):
    from megatron.core.transformer.moe.moe_utils import group_limited_topk

    scores = torch.rand(200, 32, generator=torch.Generator().manual_seed(topk))
    ours = chosen(
        wrap_group_limited_topk(group_limited_topk, counted), scores, topk, num_groups, group_topk
    )
    assert ours == plain(scores, topk, num_groups, group_topk, counted)
    megatron = chosen(group_limited_topk, scores, topk, num_groups, group_topk)
    assert (ours == megatron) == (counted == topk // group_topk)
