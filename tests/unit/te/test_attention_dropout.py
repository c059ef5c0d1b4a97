"""Dropout draws from the tracker it is given, also when attention is computed again."""

from contextlib import contextmanager

import pytest
import torch

from mindspeed.te.pytorch import DotProductAttention
from tests.unit.te.dense_attention import H, N, S, band, dense, make


class Tracker:
    """Counts forks and gives each its own seed, like Megatron's tracker."""

    def __init__(self):
        self.state = torch.Generator().manual_seed(7).get_state()
        self.forks = 0

    def get_states(self):
        return {"model-parallel-rng": self.state}

    def set_states(self, states):
        self.state = states["model-parallel-rng"]

    @contextmanager
    def fork(self):
        self.forks += 1
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(outside)


def test_dropout_draws_from_the_tracker():
    inputs = make()
    tracker = Tracker()
    attention = DotProductAttention(N, H, None, 0.5, get_rng_state_tracker=lambda: tracker)
    torch.manual_seed(1)
    outside = torch.get_rng_state()
    dropped = attention(*inputs)
    assert tracker.forks == 1
    assert torch.equal(torch.get_rng_state(), outside)
    assert not torch.allclose(dropped, attention(*inputs))

    torch.set_rng_state(Tracker().state)
    alone = DotProductAttention(N, H, None, 0.5)(*inputs)
    assert torch.equal(dropped, alone)

    attention.eval()
    torch.testing.assert_close(attention(*inputs), dense(*inputs, band(S, S)))
    assert tracker.forks == 2


def test_dropout_under_sequence_parallelism_leaves_the_tracker_to_the_caller():
    tracker = Tracker()
    attention = DotProductAttention(
        N, H, None, 0.5, get_rng_state_tracker=lambda: tracker, sequence_parallel=True
    )
    attention(*make())
    assert tracker.forks == 0


def test_dropout_keeps_the_mean():
    v = torch.ones(S, 400, N, H)
    out = DotProductAttention(N, H, None, 0.25, attn_mask_type="no_mask")(v, v, v)
    assert abs(out.mean().item() - 1.0) < 0.02
    assert out.std() > 0.1


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointed_attention_equals_the_plain_one(dropout):
    results = []
    for checkpointed in (False, True):
        inputs = make()
        tracker = Tracker()
        attention = DotProductAttention(
            N, H, None, dropout, get_rng_state_tracker=lambda tracker=tracker: tracker
        )
        out = attention(*inputs, checkpoint_core_attention=checkpointed)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in inputs), tracker.state])
    assert all(torch.equal(one, other) for one, other in zip(*results))
