"""The choice of experts: a loop over tokens, float64, finite differences, ties, refusals."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed.ops.router_topk import reference, router_topk, triton_impl

IMPLS = pytest.mark.parametrize("impl", [reference, triton_impl], ids=["reference", "triton"])
RULES = {
    "softmax of the chosen": {},
    "softmax of all": {"use_pre_softmax": True, "scaling_factor": 2.5},
    "softmax in groups": {"use_pre_softmax": True, "num_groups": 4, "group_topk": 2},
    "logits in groups": {"num_groups": 4, "group_topk": 2},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid, biased, in groups": {
        "score_function": "sigmoid",
        "expert_bias": torch.linspace(-1, 1, 12),
        "num_groups": 4,
        "group_topk": 2,
        "scaling_factor": 1.5,
    },
    "sigmoid, all groups": {"score_function": "sigmoid", "num_groups": 4, "group_topk": 4},
}
BY_RULE = pytest.mark.parametrize("rule", RULES)


def one_token(x, topk, rule):
    """Route one token by Python's floats; return {expert: probability} and all scores."""
    experts = range(len(x))
    is_sigmoid = rule.get("score_function") == "sigmoid"
    raw = [1 / (1 + math.exp(-v)) if is_sigmoid else math.exp(v) for v in x]
    scores = [value / sum(raw) for value in raw]
    bias = rule.get("expert_bias")
    if is_sigmoid:
        rank = [raw[e] + (0.0 if bias is None else bias[e].item()) for e in experts]
    else:
        rank = scores if rule.get("use_pre_softmax") else x
    allowed = list(experts)
    if rule.get("group_topk"):
        size = len(x) // rule["num_groups"]
        groups = [range(g * size, (g + 1) * size) for g in range(rule["num_groups"])]
        best = topk // rule["group_topk"]
        groups.sort(key=lambda g: -sum(sorted((rank[e] for e in g), reverse=True)[:best]))
        allowed = sorted(e for group in groups[: rule["group_topk"]] for e in group)
    chosen = sorted(allowed, key=lambda e: -rank[e])[:topk]  # stable: the lower expert first
    if is_sigmoid and topk == 1:
        norm = 1.0
    elif not is_sigmoid and rule.get("use_pre_softmax"):
        norm = sum(raw)
    else:
        norm = sum(raw[e] for e in chosen)
    factor = rule.get("scaling_factor", 1.0)
    return {e: raw[e] / norm * factor for e in chosen}, scores


def grads(impl, logits, topk, rule, weights):
    """Return probabilities, choice, scores and the gradient of a weighted sum of both."""
    logits = logits.detach().clone().requires_grad_()
    out = impl.router_topk(logits, topk, with_scores=True, **rule)
    (grad,) = torch.autograd.grad(
        (out.probs * weights[0]).sum() + (out.scores * weights[1]).sum(), logits
    )
    return out.probs.detach(), out.chosen, out.scores.detach(), grad


@IMPLS
@BY_RULE
@pytest.mark.parametrize("topk", [1, 4, 6])
def test_equals_a_loop_over_tokens(impl, rule, topk):
    options = dict(RULES[rule])
    if options.get("group_topk"):
        options["group_topk"] = min(options["group_topk"], topk)
    torch.manual_seed(3)
    logits = torch.randn(7, 12) * 2
    probs, chosen, scores, _ = grads(impl, logits, topk, options, [0.0, 0.0])
    for token, row in enumerate(logits.tolist()):
        expected, all_scores = one_token(row, topk, options)
        assert chosen[token].nonzero().flatten().tolist() == sorted(expected)
        true = torch.tensor([expected.get(e, 0.0) for e in range(12)])
        torch.testing.assert_close(probs[token], true, rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(scores[token], torch.tensor(all_scores), rtol=2e-6, atol=1e-7)


@BY_RULE
@pytest.mark.parametrize("topk", [1, 4])
def test_gradients_equal_finite_differences(rule, topk):
    options = dict(RULES[rule])
    if options.get("group_topk"):
        options["group_topk"] = min(options["group_topk"], topk)
    torch.manual_seed(5)
    logits = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)

    def differentiable(x):
        out = reference.router_topk(x, topk, with_scores=True, **options)
        return out.probs, out.scores

    assert torch.autograd.gradcheck(differentiable, logits)


@BY_RULE
@pytest.mark.parametrize("shape", [(37, 12, 4), (1, 12, 12), (130, 12, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_float64(rule, shape, dtype):
    tokens, experts, topk = shape
    options = dict(RULES[rule])
    if topk == experts and options.get("group_topk"):
        options["group_topk"] = 4
    torch.manual_seed(7)
    logits = torch.randn(tokens, experts).to(dtype)
    weights = torch.randn(2, tokens, experts)
    exact = grads(reference, logits.double(), topk, options, weights.double())
    ours = grads(triton_impl, logits, topk, options, weights)
    assert torch.equal(ours[1], exact[1])
    bound = 1e-6 if dtype == torch.float32 else 4e-3  # one rounding of the result
    for got, true in zip((ours[0], ours[2], ours[3]), (exact[0], exact[2], exact[3])):
        assert (got.double() - true).norm() <= bound * true.norm() + 1e-12
    assert ours[0].dtype == dtype and ours[2].dtype == torch.float32


@IMPLS
def test_equals_go_to_the_lowest_expert(impl):
    logits = torch.zeros(2, 12)
    logits[1, 5:] = 1.0
    bias = torch.zeros(12)
    for rule in RULES.values():
        options = rule | ({"expert_bias": bias} if "expert_bias" in rule else {})
        chosen = impl.router_topk(logits, 4, **options).chosen
        assert chosen[0].nonzero().flatten().tolist() == [0, 1, 2, 3]
        first = 5 if options.get("group_topk") != 2 else 6  # its group has an expert less
        assert chosen[1].nonzero().flatten().tolist() == [first + n for n in range(4)]


@settings(deadline=None)
@given(
    values=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, float("-inf")]), min_size=8, max_size=8),
    topk=st.integers(1, 8),
    is_sigmoid=st.booleans(),
)
def test_any_ties_are_broken_alike(values, topk, is_sigmoid):
    logits = torch.tensor([values])
    rule = {"score_function": "sigmoid" if is_sigmoid else "softmax"}
    ours, plain = (i.router_topk(logits, topk, **rule).chosen for i in (triton_impl, reference))
    assert ours.sum() == topk and torch.equal(ours, plain)


@IMPLS
@BY_RULE
def test_nan_is_seen_in_the_weights_and_every_token_has_its_experts(impl, rule):
    logits = torch.randn(3, 12)
    logits[1, 7] = float("nan")
    out = impl.router_topk(logits, 4, **RULES[rule])
    assert out.chosen.sum(1).tolist() == [4, 4, 4]
    assert out.probs.isfinite().all(1).tolist() == [True, False, True]


@IMPLS
@pytest.mark.parametrize("experts", [1, 3, 130])
def test_any_number_of_experts_strided_logits_and_no_tokens(impl, experts):
    wide = torch.randn(5, 2 * experts)[:, ::2]
    expected = reference.router_topk(wide.double(), 1)
    out = impl.router_topk(wide, 1)
    assert torch.equal(out.chosen, expected.chosen) and out.scores is None
    empty = torch.zeros(0, experts, requires_grad=True)
    probs = impl.router_topk(empty, 1).probs
    probs.sum().backward()
    assert empty.grad.shape == (0, experts)


def test_the_kernel_reads_the_expanded_gradient_of_a_sum():
    logits = torch.randn(6, 5, requires_grad=True)
    scores = triton_impl.router_topk(logits, 2, with_scores=True).scores
    (scores.sum(0) * torch.arange(5.0)).sum().backward()
    exact = logits.detach().double().requires_grad_()
    (exact.softmax(1).sum(0) * torch.arange(5.0)).sum().backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (((3,), 1, {}), r"needs logits \(T, E\), got \(3,\)"),
        (((2, 4), 1, {"score_function": "relu"}), "'relu': use one of softmax, sigmoid"),
        (((2, 4), 5, {}), "topk=5: choose from 1 to all 4 experts"),
        (((2, 4), 1, {"expert_bias": torch.zeros(3)}), r"\(3,\): give one number for each of 4"),
        (((2, 4), 2, {"num_groups": 3, "group_topk": 1}), "a number of groups that divides 4"),
        (((2, 4), 1, {"num_groups": 2, "group_topk": 2}), "choose a topk from 2 to 4"),
        (((2, 8), 3, {"num_groups": 4, "group_topk": 1}), "1 groups of 2: choose a topk from 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(args, message):
    shape, topk, options = args
    with pytest.raises(ValueError, match=message):
        router_topk(torch.zeros(shape), topk, **options)
