"""Parameter gathering during forward: nothing is read before it has come, the next comes early."""

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.gpt.buckets import BucketEvents, buckets, foreign_shards
from tests.gpt.layout import Layout
from tests.gpt.runs import STEPS, assert_same_training, in_ranks, trained

if TYPE_CHECKING:
    from tests.gpt.training import Training


def _layout(**changes: Any) -> Layout:
    return Layout(
        dp=2,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=8000,
        **changes,
    )


@pytest.mark.parametrize(
    "layout", [_layout(), _layout(spec="te"), _layout(family="llama", spec="te")], ids=str
)
def test_gathering_during_forward_trains_alike(layout: Layout) -> None:
    assert_same_training(layout)


@pytest.mark.parametrize("spec", ["local", "te"])
def test_nothing_is_read_before_it_was_gathered(spec: str) -> None:
    """After each step all that other ranks update is NaN here, until it is gathered."""
    layout = _layout(spec=spec)
    ranks = in_ranks(layout, _train_poisoned)
    losses = [sum(step) / layout.dp for step in zip(*(losses for losses, _ in ranks))]
    assert losses == trained(layout).losses
    assert [early for _, early in ranks] == [[], []]


def test_the_poison_would_be_noticed() -> None:
    for loss in in_ranks(_layout(), _loss_without_gathering):
        assert math.isnan(loss)


@pytest.mark.parametrize("spec", ["local", "te"])
def test_a_bucket_is_gathered_once_and_ahead_of_its_use(spec: str) -> None:
    for log in in_ranks(_layout(spec=spec), _events):
        gathered = [which for what, which in log if what == "gather"]
        used = list(dict.fromkeys(which for what, which in log if what == "use"))
        assert len(gathered) > 2
        assert sorted(gathered) == sorted(used) == list(range(len(gathered)))
        assert not any(what == "blocking gather" for what, _ in log)
        for bucket, following in zip(gathered, gathered[1:]):
            assert log.index(("gather", following)) < log.index(("use", bucket))


def _train_poisoned(training: "Training") -> tuple[list[float | None], list[str]]:
    """Return the losses and the modules that began with a parameter that had not come."""
    early: list[str] = []
    for name, module in training.chunks[0].named_modules():
        module.register_forward_pre_hook(_noting_poison(early, name))
    losses = []
    for _ in range(STEPS):
        loss, _ = training.step()
        losses.append(loss)
        _poison(training)
    return losses, early


def _noting_poison(early: list[str], name: str) -> Any:
    def hook(module: torch.nn.Module, _: Any) -> None:
        if any(parameter.isnan().any() for parameter in module.parameters(recurse=False)):
            early.append(name)

    return hook


def _poison(training: "Training") -> None:
    for shard in foreign_shards(training):
        shard.fill_(torch.nan)


def _loss_without_gathering(training: "Training") -> float | None:
    training.step()
    _poison(training)
    training.wrapped[0].disable_forward_pre_hook(param_sync=False)
    loss, _ = training.step()
    return loss


def _events(training: "Training") -> list[tuple[str, int]]:
    """Return the gathers of one step, and when each bucket is first used."""
    training.step()
    events = BucketEvents(training)
    home = {p: i for i, bucket in enumerate(buckets(training)) for p in bucket.params}
    for module in training.chunks[0].modules():
        for parameter in module.parameters(recurse=False):
            module.register_forward_pre_hook(_noting_use(events.log, home[parameter]))
    training.step()
    return events.log


def _noting_use(log: list[tuple[str, int]], bucket: int) -> Any:
    def hook(module: torch.nn.Module, _: Any) -> None:
        log.append(("use", bucket))

    return hook
