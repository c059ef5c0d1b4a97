"""Recomputed layers that keep the results of attention: the same bits, half the forward passes."""

from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import mindspeed
from tests.distributed import context_model
from tests.gpt.layout import Layout
from tests.gpt.runs import assert_same_weights
from tests.ranks import run_ranks

LLAMA = Layout("llama", spec="te", recompute=("full", "block", 4))
FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"


def _train(layout):
    from tests.gpt.training import Training, destroy_groups

    training, found = Training(layout), []
    with profile(activities=[ProfilerActivity.CPU]) as run:
        found.append(training.forward_backward())
    training.update()
    found.append(training.forward_backward())
    calls = sum(event.count for event in run.key_averages() if event.key == FORWARD)
    gradients = training.gradients()
    destroy_groups()
    return found, gradients, calls


def _both(layouts, **others):
    """Train plain, then keep the results of attention."""
    mindspeed.enable(**others)
    plain = [_train(layout) for layout in layouts]
    mindspeed.enable(recompute_keep_attention=True, **others)
    return list(zip(plain, [_train(layout) for layout in layouts], strict=True))


def _check(found):
    for plain, ours in found:
        assert ours[0] == plain[0]
        assert_same_weights(ours[1], plain[1])
        assert ours[2] > 0 and plain[2] == 2 * ours[2]


def test_one_rank_computes_each_attention_once():
    """Layers one by one, and chunks of two."""
    layouts = [LLAMA, replace(LLAMA, recompute=("full", "uniform", 2))]
    (found,) = run_ranks(_both, 1, layouts)
    _check(found)


TWO_RANKS = [
    replace(LLAMA, tp=2, sequence_parallel=True),
    replace(LLAMA, pp=2),
    replace(LLAMA, pp=2, layers_per_virtual_stage=1),
]


def test_tensor_and_pipeline_parallel_ranks():
    for found in run_ranks(_both, 2, TWO_RANKS):
        _check(found)


def _in_advance():
    return _both([replace(LLAMA, pp=2)], recompute_in_advance=True)


def test_recompute_in_advance():
    """It has its own checkpoint function, which gets the one that keeps results."""
    for found in run_ranks(_in_advance, 2):
        _check(found)


def _split_sequences():
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    full |= {"recompute_num_layers": 1}
    cases = [("p2p", False), ("p2p", True), ("all_gather", True), ("a2a", False)]

    def all_cases():
        return [context_model.train(2, comm_type=c, packed=p, steps=2, **full) for c, p in cases]

    plain = all_cases()
    mindspeed.enable(recompute_keep_attention=True)
    return plain, all_cases()


def test_split_and_packed_sequences():
    for plain, ours in run_ranks(_split_sequences, 2):
        assert ours == plain


def test_a_checkpoint_inside_a_checkpoint_takes_from_the_outer_one():
    from mindspeed.ops.fusion_attention import sdpa
    from mindspeed.ops.fusion_attention.kept import KeptResults

    def attend(x):
        return sdpa.attention(x, x, x, scale=0.5, is_causal=True)

    def inner(x):
        return checkpoint(KeptResults().wrap_function(attend), x, use_reentrant=True)

    def outer(x):
        return inner(attend(x)) + inner(x)

    torch.manual_seed(1)
    x = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    counts, gradients = [], []
    for function in (outer, KeptResults().wrap_function(outer)):
        leaf = x.clone().requires_grad_()
        with profile(activities=[ProfilerActivity.CPU]) as run:
            checkpoint(function, leaf, use_reentrant=True).square().sum().backward()
        gradients.append(leaf.grad)
        counts.append(sum(e.count for e in run.key_averages() if e.key == FORWARD))
    assert torch.equal(*gradients)
    assert counts[1] == 3 < counts[0]


def test_a_layer_that_calls_attention_less_often_again_is_an_error():
    from mindspeed.ops.fusion_attention import sdpa
    from mindspeed.ops.fusion_attention.kept import KeptResults

    runs = []

    def changing(x):
        runs.append(1)
        out = sdpa.attention(x, x, x, scale=0.5)
        return sdpa.attention(out, x, x, scale=0.5) if len(runs) == 1 else out

    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    out = checkpoint(KeptResults().wrap_function(changing), x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="left 1 results of attention unused"):
        out.sum().backward()
