"""A script's own loader, unchanged: shared by ranks, without end, from any place on."""

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from mindspeed.config import ConfigError
from mindspeed.distributed.parallel_dims import ParallelDims
from mindspeed_mm.training.batches import Batches
from tests.ranks import run_ranks

SIZE = 13
"""Seven batches of two an epoch, the last one smaller."""


def dims(dp: int = 1, rank: int = 0) -> ParallelDims:
    return ParallelDims(world=dp, rank=rank, micro_batch_size=2)


def take(loader: Any, count: int, dp: int = 1, rank: int = 0, consumed: int = 0) -> list[Any]:
    batches = Batches(loader, "train", dims(dp, rank), seed=3).endless(consumed)
    return [batch.tolist() for batch in islice(batches, count)]


def shuffled(**more: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(SIZE), batch_size=2, shuffle=True, **more)


@pytest.mark.parametrize("own", [False, True], ids=["torch's numbers", "a generator of its own"])
def test_ranks_share_one_order_whatever_their_number(own: bool) -> None:
    def make() -> DataLoader[Any]:
        return shuffled(generator=torch.Generator().manual_seed(5) if own else None)

    alone = take(make(), 18)
    epochs = [sorted(sum(alone[n : n + 7], [])) for n in (0, 7)]
    assert epochs == [list(range(SIZE))] * 2 and alone[:7] != alone[7:14]
    for dp in (2, 3):
        ranks = [take(make(), 18 // dp, dp, rank) for rank in range(dp)]
        together = [batch for batches in zip(*ranks) for batch in batches]
        assert together == alone
        # Two samples a rank and round: so the second round of this one is where another goes on.
        assert take(make(), 3, consumed=4 * dp) == alone[2 * dp : 2 * dp + 3]


def test_other_ranks_go_on_between_two_of_their_rounds() -> None:
    """Five batches were consumed, and two ranks take two at a time."""
    alone = take(shuffled(), 11)
    ranks = [take(shuffled(), 3, dp=2, rank=rank, consumed=10) for rank in range(2)]
    assert [batch for batches in zip(*ranks) for batch in batches] == alone[5:]


def weighted() -> DataLoader[Any]:
    return DataLoader(
        torch.arange(SIZE),  # type: ignore[arg-type]
        batch_size=2,
        sampler=WeightedRandomSampler(list(range(1, SIZE + 1)), SIZE),
    )


def subset() -> DataLoader[Any]:
    sampler = SubsetRandomSampler(range(SIZE))
    return DataLoader(torch.arange(SIZE), batch_size=2, sampler=sampler)  # type: ignore[arg-type]


def ready_made() -> DataLoader[Any]:
    """Items are batches already."""
    data = torch.arange(14).view(7, 2)
    return DataLoader(data, batch_size=None, shuffle=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [weighted, subset, ready_made])
def test_samplers_of_torch_that_know_no_ranks_are_split(
    make: Callable[[], DataLoader[Any]],
) -> None:
    alone = take(make(), 12)
    assert alone[:6] != alone[6:] and alone == take(make(), 12)
    ranks = [take(make(), 6, 2, rank) for rank in (0, 1)]
    assert [batch for batches in zip(*ranks) for batch in batches] == alone
    assert take(make(), 2, consumed=16) == alone[8:10], "any position"


def test_numbers_of_the_step_are_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    for make in (shuffled, ready_made, lambda: DataLoader(Stream(), batch_size=2)):
        torch.manual_seed(1)
        take(make(), 1)
        assert torch.equal(torch.rand(1), expected)
    assert take(shuffled(), 7) == take(shuffled(), 7)


def _warnings_of_same_batches() -> list[list[str]]:
    """Return what this rank logs for four loaders: the first two are the same on all ranks."""
    rank, data = dist.get_rank(), list(range(12))
    by_length = [data[i : i + 2] for i in range(0, 12, 2)]
    sampler: Any = DistributedSampler(data)  # type: ignore[arg-type]
    loaders: list[Any] = [
        DataLoader(Stream(), batch_size=2),
        DataLoader(data, batch_sampler=by_length),  # type: ignore[arg-type]
        DataLoader(data, batch_sampler=by_length[rank::2]),  # type: ignore[arg-type]
        DataLoader(data, batch_size=2, sampler=sampler),  # type: ignore[arg-type]
    ]
    found: list[list[str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: found[-1].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mindspeed_mm").addHandler(handler)
    for loader in loaders:
        found.append([])
        whole = take(loader, 3, 2, rank)
        assert len(whole) == 3
    return found


def test_ranks_that_read_the_same_batch_get_a_warning() -> None:
    for stream, batches, *split in run_ranks(_warnings_of_same_batches, 2):
        assert "all 2 data-parallel ranks read the same train batch" in stream[0]
        assert len(stream) == len(batches) == 1 and split == [[], []]


def test_a_sampler_that_knows_ranks_is_used_as_it_is() -> None:
    def make(rank: int) -> DataLoader[Any]:
        data = torch.arange(SIZE - 1)
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, seed=1)  # type: ignore[arg-type]
        return DataLoader(data, batch_size=2, sampler=sampler)  # type: ignore[arg-type]

    first, second = (take(make(rank), 6, 2, rank) for rank in (0, 1))
    assert sorted(sum(first[:3] + second[:3], [])) == list(range(SIZE - 1))
    assert first[:3] != first[3:], "another epoch, another order"
    assert take(make(0), 2, 2, 0, consumed=16) == first[4:6]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_streams_and_iterators_are_read_up_to_the_place() -> None:
    assert take(DataLoader(Stream(), batch_size=2), 4, consumed=4) == [
        [4, 5],
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    numbers = (torch.tensor([n]) for n in range(9))
    assert take(numbers, 2, consumed=6) == [[3], [4]]


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="give --micro-batch-size 4"):
        Batches(DataLoader(torch.arange(9), batch_size=4), "train", dims(), 0)  # type: ignore[arg-type]
    for loader in (DataLoader(torch.arange(1), batch_size=2, drop_last=True), []):  # type: ignore
        with pytest.raises(ConfigError, match="the train loader gives no batch"):
            take(loader, 1)
    with pytest.raises(ConfigError, match="the train iterator has ended, and cannot begin again"):
        take(iter([torch.ones(1)]), 2)
    with pytest.raises(ConfigError, match="returned a dataset for train .*: return a DataLoader"):
        Batches(TensorDataset(torch.ones(3)), "train", dims(), 0)
    with pytest.raises(ConfigError, match="give --train-iters"):
        Batches(iter([]), "train", dims(), 0).samples_per_epoch()
    assert Batches(shuffled(), "train", dims(2), 0).samples_per_epoch() == 14
