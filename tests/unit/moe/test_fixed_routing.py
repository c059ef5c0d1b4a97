"""Routing for benchmarks: even, and the same whatever the scores are."""

import pytest
import torch

from mindspeed.moe.fixed_routing import fixed_logits
from mindspeed.te.pytorch.router import fused_topk_with_score_function


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("tokens", "experts", "topk"), [(8, 4, 2), (7, 5, 3), (5, 4, 4), (9, 4, 1)]
)
def test_the_load_is_even_and_fixed(score, tokens, experts, topk):
    found = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        logits = 5 * torch.randn(tokens, experts, generator=generator)
        logits.requires_grad_()
        probs, mask = fused_topk_with_score_function(
            fixed_logits(logits, topk),
            topk,
            use_pre_softmax=False,
            num_groups=None,
            group_topk=None,
            scaling_factor=None,
            score_function=score,
            expert_bias=torch.randn(experts, generator=generator) / 10,
        )
        counts = mask.sum(0)
        assert counts.max() - counts.min() <= 1 and counts.sum() == tokens * topk
        assert (mask.sum(1) == topk).all()
        # The weight of a single choice by sigmoid is its score.
        weight = torch.sigmoid(torch.tensor(10.0)) if (score, topk) == ("sigmoid", 1) else 1 / topk
        torch.testing.assert_close(probs[mask], torch.full((tokens * topk,), float(weight)))
        (probs**2).sum().backward()
        assert not logits.grad.any()
        found.append((probs.detach(), mask))
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][0], found[1][0])
