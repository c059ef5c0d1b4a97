"""A clipped update queued in one go equals the step of Megatron's own optimizer, bit for bit."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.gpt.layout import Layout
from tests.ranks import run_ranks

LAYOUTS = [
    Layout(bf16=True, spec="te"),
    Layout(spec="te"),
    Layout(bf16=True, tp=2, sequence_parallel=True, spec="te"),
    Layout(bf16=True, dp=2, distributed_optimizer=True, spec="te"),
    Layout(pp=2, spec="te"),
]


def train(layout, is_ours, clip, adam=True):
    """Take three steps, the second with a gradient that is no number; return norms and weights."""
    from megatron.core.optimizer import optimizer as megatron

    from mindspeed.te.pytorch.optimizers import clipped_update
    from tests.gpt.training import Training

    training = Training(layout)
    optimizer = training.optimizer
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for part in parts:
        part.config.clip_grad = clip
        if not adam:
            groups = part.optimizer.param_groups
            part.optimizer = torch.optim.SGD(groups, lr=0.01)
    norms = []
    for number in range(3):
        training.forward_backward()
        is_bad = number == 1
        if is_ours:
            assert not optimizer.prepare_grads()
            norm = clipped_update.gradient_norm(optimizer)
            is_good = torch.tensor(not is_bad)
            updated = clipped_update.update(optimizer, norm, is_good)
            if updated and is_bad:
                clipped_update.retract(optimizer)
        elif is_bad:
            optimizer.prepare_grads()
            norm = optimizer.get_grad_norm()
        else:
            _, norm, _ = optimizer.step()
        norms.append(float(norm))
    assert issubclass(type(parts[0]), megatron.MegatronOptimizer)
    steps = [group.get("step") for part in parts for group in part.optimizer.param_groups]
    return norms, steps, [shard.values for shard in training.weights()]


@pytest.mark.parametrize("name", ["get_main_grads_for_grad_norm", "get_grads_for_grad_norm"])
def test_gradients_have_the_name_of_each_megatron(name):
    from mindspeed.te.pytorch.optimizers.clipped_update import _grads

    grads = [torch.ones(2)]
    assert _grads(SimpleNamespace(**{name: lambda: grads})) == grads


@pytest.mark.parametrize("clip", [0.05, 0.0])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equals_megatrons_own_step(layout, clip):
    ours = run_ranks(train, layout.world, layout, True, clip)
    theirs = run_ranks(train, layout.world, layout, False, clip)
    for (norms, steps, weights), (norms_, steps_, weights_) in zip(ours, theirs):
        assert all(math.isfinite(norm) and norm > 0.05 for norm in norms)
        assert norms == norms_
        assert steps == steps_
        assert all(map(torch.equal, weights, weights_))


def test_other_optimizers_are_clipped_as_well():
    layout = Layout(spec="te")
    [(norms, _, weights)] = run_ranks(train, 1, layout, True, 0.05, False)
    [(norms_, _, weights_)] = run_ranks(train, 1, layout, False, 0.05, False)
    assert norms == norms_
    assert all(map(torch.equal, weights, weights_))
