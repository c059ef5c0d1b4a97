"""Recompute ahead of the gradient: the same numbers, in the time before a message is there."""

import inspect
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch

import mindspeed
from tests.gpt.layout import Layout
from tests.ranks import run_ranks

BLOCK = ("full", "block", 1)
VIRTUAL = Layout(pp=2, dp=2, layers_per_virtual_stage=1, micro_batch=1, dropout=0.1)
CASES = {
    # First: megatron-core 0.12 does not forget virtual stages when groups are made again.
    "in advance, four stages": (
        Layout("llama", spec="te", pp=4, micro_batch=1, recompute=BLOCK, dropout=0.1),
        "recompute_in_advance",
    ),
    "in advance, virtual stages": (replace(VIRTUAL, recompute=BLOCK), "recompute_in_advance"),
    "in advance, two layers a chunk": (
        replace(VIRTUAL, num_layers=8, layers_per_virtual_stage=2, recompute=("full", "block", 2)),
        "recompute_in_advance",
    ),
    "in the bubble": (replace(VIRTUAL, spec="te"), "recompute_in_bubble"),
}


class _Handle:
    """A message whose wait is recorded."""

    def __init__(self, handle, log):
        self.handle, self.log = handle, log

    def wait(self):
        self.log.append("wait")
        self.handle.wait()


def _with_log(stack, log):
    """Record where gradients are posted and waited for, below what is proved here."""
    from megatron.core.pipeline_parallel import p2p_communication

    def watched(original):
        def ops(**kwargs):
            handles = original(**kwargs)
            if kwargs["tensor_recv_next"] is not None:
                log.append("post")
                if isinstance(handles, dict):
                    handles["recv_next"] = _Handle(handles["recv_next"], log)
                else:
                    handles[-1] = _Handle(handles[-1], log)
            return handles

        ops.__signature__ = inspect.signature(original)  # the patch engine compares it
        return ops

    for name in ("_p2p_ops", "_batched_p2p_ops"):
        original = getattr(p2p_communication, name)
        stack.enter_context(mock.patch.object(p2p_communication, name, watched(original)))


def _run(layout, features):
    """Train two steps; return the log of the first, peak bytes, gradients."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    from mindspeed.parallel.pipeline import recompute_ahead
    from tests.gpt.saved import SavedTensors
    from tests.gpt.training import Training

    parallel_state.destroy_model_parallel()
    log, kept = [], []
    with ExitStack() as stack:
        _with_log(stack, log)
        mindspeed.enable(**features)
        training = Training(layout)
        parameters = [p for chunk in training.chunks for p in chunk.parameters()]
        saved = stack.enter_context(SavedTensors(parameters))

        def watch(owner, name, event):
            original = getattr(owner, name)

            def watched(*args, **kwargs):
                value = original(*args, **kwargs)
                log.append(event)
                if event != "B":
                    kept.append(sum(each.bytes for each in saved.kept()))
                return value

            stack.enter_context(mock.patch.object(owner, name, watched))

        watch(schedules, "forward_step", "F")
        watch(schedules, "backward_step", "B")
        watch(recompute_ahead.Checkpoint, "recompute", "R")
        losses = [training.step()]
        events = list(log)
    losses.append(training.step())
    return events, max(kept), losses, training.gradients()


def _run_all(cases):
    return [
        (_run(layout, {}), _run(layout, {feature: True}), _one_chunk(layout))
        for layout, feature in cases
    ]


def _one_chunk(layout):
    """Return the bytes that the forward pass of one chunk keeps without recompute."""
    from megatron.core import parallel_state

    from tests.gpt.saved import kept_after_forward
    from tests.gpt.training import Training

    parallel_state.destroy_model_parallel()
    mindspeed.enable()
    training = Training(replace(layout, recompute=None))
    return sum(each.bytes for each in kept_after_forward(training))


@pytest.fixture(scope="module")
def outcomes():
    ranks = run_ranks(_run_all, 4, list(CASES.values()), timeout=240)
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_the_same_in_every_bit(outcomes, name):
    """With dropout: the random numbers of the second run are those of the first."""
    for plain, ours, _ in outcomes[name]:
        assert ours[2] == plain[2]
        for key, gradient in plain[3].items():
            assert torch.equal(ours[3][key], gradient), key


@pytest.mark.parametrize("name", CASES)
def test_recompute_runs_behind_the_post_and_before_the_wait(outcomes, name):
    """Every gradient that is waited for finds its activations; nothing else of the log changes."""
    recomputed = 0
    for plain, ours, _ in outcomes[name]:
        assert [event for event in ours[0] if event != "R"] == plain[0]
        text = "".join({"post": "p", "wait": "w"}.get(event, event) for event in ours[0])
        assert "wR" not in text
        recomputed += text.count("Rw")
        for before in text.split("Rw")[:-1]:
            assert before.count("p") > before.count("w"), "the receive was not posted"
    assert recomputed > 0


def test_only_one_chunk_is_recomputed_at_a_time(outcomes):
    """Full recompute and one chunk's activations are the most that is kept."""
    for name in ("in advance, virtual stages", "in advance, two layers a chunk"):
        layers = CASES[name][0].layers_per_virtual_stage
        for full, ours, one_chunk in outcomes[name]:
            assert ours[1] <= full[1] + one_chunk
            runs = "".join(event for event in ours[0] if event in "RB").split("B")
            assert max(map(len, runs)) == layers


def test_no_more_chunks_than_fill_the_pipeline_keep_their_activations(outcomes):
    excess = 0
    for plain, ours, _ in outcomes["in the bubble"]:
        most = _most_live(plain[0])
        excess += most > 4
        recomputes = ours[0].count("R")
        assert (recomputes > 0) == (most > 4)
        if most > 4:
            assert ours[1] < plain[1] * 4.5 / most
    assert excess == 2, "the first stage of both replicas runs ahead"


def _most_live(events):
    counts = [0]
    for event in events:
        counts.append(counts[-1] + {"F": 1, "B": -1}.get(event, 0))
    return max(counts)
