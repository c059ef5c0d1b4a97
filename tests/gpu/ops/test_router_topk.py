"""The choice of experts on the GPU: the kernels against the reference in float64."""

import pytest
import torch

from mindspeed import device
from mindspeed.ops.router_topk import reference, router_topk

pytestmark = pytest.mark.gpu
RULES = {
    "softmax of the chosen": (128, 8, {}),
    "softmax of all": (64, 6, {"use_pre_softmax": True, "scaling_factor": 2.5}),
    "softmax in groups": (160, 6, {"use_pre_softmax": True, "num_groups": 8, "group_topk": 3}),
    "sigmoid, biased, in groups": (
        256,
        8,
        {"score_function": "sigmoid", "num_groups": 8, "group_topk": 4, "scaling_factor": 2.5},
    ),
    "few experts": (8, 2, {}),
    "more than a warp's": (1000, 1, {"score_function": "sigmoid"}),
}


def case(rule, tokens, dtype):
    experts, topk, options = RULES[rule]
    torch.manual_seed(0)
    where = device.current().torch_device
    logits = torch.randn(tokens, experts, device=where).to(dtype)
    if options.get("num_groups") and options.get("score_function") == "sigmoid":
        options = options | {"expert_bias": torch.randn(experts, device=where) / 10}
    return logits, topk, options, torch.randn(2, tokens, experts, device=where)


def run(function, logits, topk, options, weights):
    logits = logits.detach().clone().requires_grad_()
    out = function(logits, topk, with_scores=True, **options)
    total = (out.probs * weights[0]).sum() + (out.scores * weights[1]).sum()
    return out.chosen, [
        out.probs.detach(),
        out.scores.detach(),
        *torch.autograd.grad(total, logits),
    ]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", [4096, 333])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_float64_and_repeats(rule, tokens, dtype):
    logits, topk, options, weights = case(rule, tokens, dtype)
    chosen, ours = run(router_topk, logits, topk, options, weights)
    again = run(router_topk, logits, topk, options, weights)
    assert torch.equal(chosen, again[0]) and all(map(torch.equal, ours, again[1]))
    exact_chosen, exact = run(
        reference.router_topk, logits.double(), topk, options, weights.double()
    )
    # Where float32 rounds sums of scores to equal numbers, the lower group or expert is chosen.
    is_same = (chosen == exact_chosen).all(1)
    is_summed = "num_groups" in options
    assert is_same.float().mean() >= (0.999 if is_summed else 1.0)
    assert bool((chosen.sum(1) == topk).all())
    bound = 2e-6 if dtype == torch.float32 else 4e-3  # one rounding of the result
    for got, true in zip(ours, exact):
        got, true = got[is_same].double(), true[is_same]
        assert (got - true).norm() <= bound * true.norm()


def test_equals_go_to_the_lowest_expert_as_in_the_reference():
    grid = torch.randint(0, 4, (2000, 64), device=device.current().torch_device).float()
    for options in ({}, {"score_function": "sigmoid"}, {"num_groups": 8, "group_topk": 2}):
        ours, plain = (f(grid, 6, **options).chosen for f in (router_topk, reference.router_topk))
        assert torch.equal(ours, plain)


def test_only_the_results_are_allocated():
    current = device.current()
    logits = torch.randn(8192, 128, device=current.torch_device)
    router_topk(logits, 8)
    before = current.memory_allocated()
    current.reset_peak_memory()
    out = router_topk(logits, 8)
    assert current.max_memory_allocated() - before == out.probs.nbytes + out.chosen.nbytes
