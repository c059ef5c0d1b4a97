"""Routing functions against a slow loop and against Megatron's own unfused ones."""

import inspect
import math

import pytest
import torch

from mindspeed.te.pytorch import router

TOKENS, EXPERTS = 11, 8
OPTIONS = dict(
    use_pre_softmax=False,
    num_groups=None,
    group_topk=None,
    scaling_factor=None,
    score_function="softmax",
    expert_bias=None,
)
CASES = {
    "softmax of the chosen": {},
    "softmax of all": {"use_pre_softmax": True},
    "scaled": {"use_pre_softmax": True, "scaling_factor": 2.5},
    "groups": {"use_pre_softmax": True, "num_groups": 4, "group_topk": 2},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid, biased, in groups": {
        "score_function": "sigmoid",
        "expert_bias": torch.linspace(-1, 1, EXPERTS),
        "num_groups": 4,
        "group_topk": 2,
        "scaling_factor": 1.5,
    },
}


def one_token(logits, topk, options):
    """Route one token the slow way; return {expert: probability}."""
    sigmoid = options["score_function"] == "sigmoid"
    experts = range(EXPERTS)
    scores = {
        e: 1 / (1 + math.exp(-logits[e])) if sigmoid else math.exp(logits[e]) for e in experts
    }
    total = sum(scores.values())
    bias = options["expert_bias"]
    rank = {e: scores[e] + (0 if bias is None else bias[e].item()) for e in experts}
    if not sigmoid and options["use_pre_softmax"]:
        rank = {e: scores[e] / total for e in experts}
    elif not sigmoid:
        rank = dict(enumerate(logits))
    allowed = list(experts)
    if options["group_topk"]:
        size = EXPERTS // options["num_groups"]
        groups = [range(g * size, (g + 1) * size) for g in range(options["num_groups"])]
        best = topk // options["group_topk"]
        groups.sort(key=lambda g: -sum(sorted((rank[e] for e in g), reverse=True)[:best]))
        allowed = [e for group in groups[: options["group_topk"]] for e in group]
    chosen = sorted(allowed, key=lambda e: -rank[e])[:topk]
    if not sigmoid and options["use_pre_softmax"]:
        norm = total
    else:
        norm = sum(scores[e] for e in chosen) if topk > 1 or not sigmoid else 1.0
    return {e: scores[e] / norm * (options["scaling_factor"] or 1.0) for e in chosen}


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_choice_and_probabilities(case, topk):
    options = {**OPTIONS, **CASES[case]}
    if topk == 1 and options["group_topk"]:
        options["group_topk"] = 1
    torch.manual_seed(8)
    logits = torch.randn(TOKENS, EXPERTS)
    probs, chosen = router.fused_topk_with_score_function(logits, topk, **options)
    for token in range(TOKENS):
        expected = one_token(logits[token].tolist(), topk, options)
        assert set(chosen[token].nonzero().flatten().tolist()) == set(expected)
        true = torch.tensor([expected.get(e, 0.0) for e in range(EXPERTS)])
        torch.testing.assert_close(probs[token], true, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_megatrons_unfused_routing(case):
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "topk_routing_with_score_function"):
        pytest.skip("megatron-core 0.12 routes without these functions")
    options = {**OPTIONS, **CASES[case]}
    torch.manual_seed(8)
    ours = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    probs, chosen = router.fused_topk_with_score_function(ours, 4, **options)
    expected, mask = moe_utils.topk_routing_with_score_function(theirs, 4, **options)
    assert torch.equal(chosen, mask)
    torch.testing.assert_close(probs, expected, rtol=1e-6, atol=1e-7)
    grad = torch.randn_like(probs)
    probs.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_scores_for_the_loss_are_normalised(score_function):
    torch.manual_seed(8)
    logits = torch.randn(TOKENS, EXPERTS)
    chosen, scores = router.fused_compute_score_for_moe_aux_loss(logits, 2, score_function)
    exact = logits.double()
    raw = exact.exp() if score_function == "softmax" else 1 / (1 + (-exact).exp())
    expected = (raw / raw.sum(1, keepdim=True)).float()
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(chosen, logits >= logits.topk(2, dim=1).values[:, 1:])


def test_loss_is_lowest_for_even_load_and_differentiable():
    probs = torch.full((4, 2), 0.5, requires_grad=True)
    even = router.fused_moe_aux_loss(probs, torch.tensor([2, 2]), 4, 2, 1, 1e-2)
    assert even.item() == pytest.approx(1e-2)
    even.backward()
    # d loss / d p = tokens_e * experts * coeff / (topk * tokens^2)
    torch.testing.assert_close(probs.grad, torch.full((4, 2), 2 * 2 * 1e-2 / 16))


def test_unknown_score_function():
    with pytest.raises(ValueError, match="use one of softmax, sigmoid"):
        router.fused_compute_score_for_moe_aux_loss(torch.zeros(2, 2), 1, "relu")


def test_signatures_take_what_megatron_passes():
    for function, names in {
        router.fused_topk_with_score_function: ["logits", "topk", *OPTIONS],
        router.fused_moe_aux_loss: [
            "probs",
            "tokens_per_expert",
            "total_num_tokens",
            "num_experts",
            "topk",
            "coeff",
        ],
    }.items():
        assert set(inspect.signature(function).parameters) == set(names)
