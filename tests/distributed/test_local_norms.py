"""Norms of local layer specs under sequence parallelism: the same training as on one rank."""

from typing import Any

import pytest

from tests.gpt.layout import Layout
from tests.ranks import run_ranks

NORMS = {"gpt": "FusedLayerNorm", "llama": "RMSNorm"}


def train(layout: Layout) -> tuple[list[Any], list[str], set[bool]]:
    """Return losses and gradient norms, the kinds of norms, and their parameters' marks."""
    from tests.gpt.training import Training

    training = Training(layout)
    block = training.chunks[0].decoder
    norms = [layer.input_layernorm for layer in block.layers]
    norms += [layer.pre_mlp_layernorm for layer in block.layers] + [block.final_layernorm]
    marks = {param.sequence_parallel for norm in norms for param in norm.parameters()}
    return [training.step() for _ in range(4)], [type(norm).__name__ for norm in norms], marks


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_sequence_parallel_norms_train_like_those_of_one_rank(family: str) -> None:
    ((expected, norms, marks),) = run_ranks(train, 1, Layout(family, num_layers=2))
    assert norms == [NORMS[family]] * 5 and marks == {False}
    split = Layout(family, num_layers=2, tp=2, sequence_parallel=True)
    for steps, norms, marks in run_ranks(train, 2, split):
        assert norms == [NORMS[family]] * 5 and marks == {True}
        for step, want in zip(steps, expected, strict=True):
            assert step == pytest.approx(want, rel=1e-5)
