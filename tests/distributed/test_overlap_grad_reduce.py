"""Gradient reduction during backward: each bucket once, as soon as it is full, the same sums."""

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.gpt.buckets import BucketEvents, buckets
from tests.gpt.layout import Layout
from tests.gpt.runs import assert_same_training, assert_same_weights, in_ranks, trained

if TYPE_CHECKING:
    from tests.gpt.training import Training

_OVERLAP: dict[str, Any] = {"dp": 2, "overlap_grad_reduce": True, "bucket_size": 8000}


@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_reduction_during_backward_changes_no_bit(distributed_optimizer: bool, spec: str) -> None:
    """With two ranks a sum of two numbers is the same however the buckets are cut."""
    layout = Layout(**_OVERLAP, distributed_optimizer=distributed_optimizer, spec=spec)
    after = trained(Layout(dp=2, distributed_optimizer=distributed_optimizer, spec=spec))
    assert trained(layout).losses == after.losses
    assert_same_weights(trained(layout).weights, after.weights)
    assert_same_training(layout)


def test_gradients_are_those_of_reduction_after_backward() -> None:
    during = in_ranks(Layout(**_OVERLAP), _gradients)
    after = in_ranks(Layout(dp=2), _gradients)
    assert_same_weights(during[0], after[0])
    assert_same_weights(during[1], during[0])


@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_a_bucket_is_reduced_once_and_as_soon_as_it_is_full(
    distributed_optimizer: bool, spec: str
) -> None:
    layout = Layout(**_OVERLAP, distributed_optimizer=distributed_optimizer, spec=spec)
    for log, members in in_ranks(layout, _events):
        reduced = [which for what, which in log if what == "reduce"]
        assert sorted(reduced) == list(range(len(members)))
        assert len(members) > 2
        assert not any(what == "blocking reduce" for what, _ in log)
        ready = [i for i, (what, _) in enumerate(log) if what == "ready"]
        for bucket in reduced:
            issued = log.index(("reduce", bucket))
            complete = max(i for i in ready if log[i][1] in members[bucket])
            assert issued == complete + 1, "something came between the last gradient and the call"
        issued_early = [i for i, (what, _) in enumerate(log) if what == "reduce" and i < ready[-1]]
        assert len(issued_early) == len(members) - 1


def _gradients(training: "Training") -> dict[str, torch.Tensor]:
    for _ in range(2):  # the first step finds out how often each gradient is accumulated
        training.forward_backward()
    return training.gradients()


def _events(training: "Training") -> tuple[list[tuple[str, int]], list[list[int]]]:
    """Return one step's events and the parameters of each bucket."""
    training.step()
    events = BucketEvents(training)
    numbers = {p: i for i, p in enumerate(training.chunks[0].parameters())}
    for parameter, number in numbers.items():
        parameter.register_hook(_appending(events.log, ("ready", number)))
    training.step()
    return events.log, [[numbers[p] for p in b.params] for b in buckets(training)]


def _appending(log: list[tuple[str, int]], event: tuple[str, int]) -> Any:
    def hook(gradient: torch.Tensor) -> None:
        log.append(event)

    return hook
