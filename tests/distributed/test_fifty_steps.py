"""Fifty steps with every accelerated operator of level 2 are fifty steps of level 0."""

import functools

import pytest
import torch

from tests.gpt.layout import GLOBAL_BATCH, SEQUENCE, VOCABULARY, Layout
from tests.ranks import run_ranks

STEPS = 50
NEEDS_A_GPU = {"fuse_swiglu_gemm"}


def train(layout, level):
    import mindspeed
    from mindspeed.features.registry import registry
    from tests.gpt.training import Training

    # A cpu enables no feature by default: enable what another device would.
    asked = [f for f in registry() if f.default_devices and f.name not in NEEDS_A_GPU]
    mindspeed.enable(optimization_level=level, **{f.enabled_by: True for f in asked})
    training = Training(layout)
    losses = []
    for step in range(STEPS):
        # Fresh data: a model that overfits one batch multiplies every rounding error.
        training._data = functools.partial(batches, step, layout)
        losses.append(training.step()[0])
    return losses, set(mindspeed.report().on) & {f.name for f in asked}


def batches(step, layout):
    """Count upwards from random starts, so that there is something to learn."""
    starts = torch.randint(
        VOCABULARY, (GLOBAL_BATCH, 1), generator=torch.Generator().manual_seed(step)
    )
    return iter(((starts + torch.arange(SEQUENCE + 1)) % VOCABULARY).split(layout.micro_batch))


@pytest.mark.parametrize("layout", [Layout("llama"), Layout("llama", spec="te")], ids=str)
def test_level_two_equals_level_zero(layout):
    ((plain, none),) = run_ranks(train, 1, layout, 0, timeout=240)
    ((fused, on),) = run_ranks(train, 1, layout, 2, timeout=240)
    assert none == set() and {"fused_swiglu", "linear_cross_entropy"} <= on
    assert plain[-1] < 0.8 * plain[0]
    assert fused == pytest.approx(plain, rel=1e-6)
