"""Batches of a script's data loader: without end, each rank's own, and from any position on."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sized
from functools import partial
from hashlib import blake2b
from itertools import chain, count, islice
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from mindspeed.config import ConfigError
from mindspeed.distributed.parallel_dims import ParallelDims
from mindspeed.launch.process import start_worker, start_workers
from mindspeed_mm.data.dataloader import (
    MicroBatchLoader,
    SampleIndex,
    SeededCollate,
    SeededDataset,
)

logger = logging.getLogger(__name__)
FOR_ONE_RANK = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers of torch that know nothing of ranks; their batches are split among the ranks."""


@runtime_checkable
class Resumable(Protocol):
    """A loader that knows its own position, in samples of all ranks."""

    consumed_samples: int
    samples_per_epoch: int

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate from the position on."""


class Batches:
    """What a loader gives to this rank, from a number of samples on."""

    def __init__(self, loader: Any, name: str, dims: ParallelDims, seed: int) -> None:
        if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            raise ConfigError(
                f"the data provider returned a dataset for {name} ({type(loader).__name__}), "
                "whose items are no batches: return a DataLoader of it, or build_mm_dataloader"
            )
        self._loader, self._name, self._dims, self._seed = loader, name, dims, seed
        self._shufflers = _Shufflers(loader)
        if isinstance(loader, DataLoader):
            loader.worker_init_fn = partial(start_worker, loader.worker_init_fn)
            if loader.generator is None:  # else it draws from the RNG of the train step
                loader.generator = torch.Generator().manual_seed(seed)
        size = getattr(loader, "batch_size", None)
        if size is not None and size != dims.micro_batch_size:
            raise ConfigError(
                f"--micro-batch-size {dims.micro_batch_size}, but the {name} loader gives batches "
                f"of {size}: give --micro-batch-size {size}"
            )

    def samples_per_epoch(self) -> int:
        """Return how many samples of all ranks are one pass over the data."""
        if isinstance(self._loader, Resumable):
            return self._loader.samples_per_epoch
        try:
            length = len(self._loader)
        except TypeError:
            raise ConfigError(
                f"--epochs: the {self._name} loader has no length: give --train-iters"
            ) from None
        is_all = self._is_plain and not self._is_shared
        return length * self._dims.micro_batch_size * (1 if is_all else self._dims.dp)

    def endless(self, consumed: int = 0) -> Iterator[Any]:
        """Give micro-batches after so many samples of all ranks; one epoch follows another."""
        if isinstance(self._loader, Resumable):
            self._loader.load_state_dict({"consumed_samples": consumed})
            return self._epochs(self._loader, 0)
        batches = self._from(consumed)
        is_split = self._is_plain and not self._is_shared
        return batches if is_split else self._warn_if_same(batches)

    def once(self) -> Iterator[Any]:
        """Give what there is to evaluate on: one pass if ranks are known to have as many batches.

        Other loaders go round, so that no rank waits for another.
        """
        if isinstance(self._loader, Resumable):
            self._loader.load_state_dict({"consumed_samples": 0})
            return iter(self._loader)
        return self._from(0)

    def finish(self, *, is_complete: bool = True) -> None:
        """Let our own loader report the records that all ranks skipped."""
        if isinstance(self._loader, MicroBatchLoader):
            self._loader.finish(is_complete=is_complete)

    def _warn_if_same(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Warn if all ranks are given one batch: what the script gives is not split among them."""
        if self._dims.dp == 1 or not dist.is_initialized():
            return batches
        first = list(islice(batches, 1))
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, _fingerprint(first))
        if all(other == found[0] for other in found):
            logger.warning(
                "all %d data-parallel ranks read the same %s batch: streams, iterators and "
                "samplers of your own are used as they are, so give every rank its own part of the "
                "data (torch.distributed.get_rank()), or use one of torch's samplers",
                *(self._dims.dp, self._name),
            )
        return chain(first, batches)

    @property
    def _is_plain(self) -> bool:
        """Whether it is torch's loader over numbered samples, for which we choose what to read."""
        loader = self._loader
        return (
            isinstance(loader, DataLoader)
            and not isinstance(loader.dataset, IterableDataset)
            and (loader.batch_sampler is not None or isinstance(loader.sampler, Sized))
        )

    @property
    def _is_shared(self) -> bool:
        """Whether its sampler gives every rank other samples already."""
        sampler, grouped = self._loader.sampler, self._loader.batch_sampler
        is_torchs = grouped is None or type(grouped) is BatchSampler
        return not (is_torchs and type(sampler) in FOR_ONE_RANK)

    def _from(self, consumed: int) -> Iterator[Any]:
        """Give micro-batches without end, after so many samples of all ranks."""
        # Another global batch size may have left off between two rounds of these ranks.
        batches = consumed // self._dims.micro_batch_size
        rounds = batches // self._dims.dp
        if self._is_plain:
            first = rounds if self._is_shared else batches + self._dims.dp_rank
            return start_workers(self._own_part(first))
        if isinstance(self._loader, Iterator):
            return self._without_end(islice(self._loader, rounds, None))
        return self._epochs(self._loader, rounds)

    def _without_end(self, batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        raise ConfigError(
            f"the {self._name} iterator has ended, and cannot begin again: return a loader or a "
            "list, or an iterator without end"
        )

    def _own_part(self, first: int) -> DataLoader[Any]:
        """Return the same loader over this rank's batches; samples before them are not read."""
        loader = self._loader
        if not len(loader):
            raise ConfigError(f"the {self._name} loader gives no batch")
        step = 1 if self._is_shared else self._dims.dp
        numbers = _Numbers(loader, self._shufflers, first, step, self._seed)
        how: dict[str, Any] = {"batch_sampler": numbers}
        collate = SeededCollate
        if loader.batch_sampler is None:  # batch_size=None: the items are batches
            how, collate = {"batch_size": None, "sampler": numbers}, _SeededConvert
        return DataLoader(
            SeededDataset(loader.dataset, self._seed),
            **how,
            num_workers=loader.num_workers,
            collate_fn=collate(loader.collate_fn, self._seed),
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
        )

    def _epochs(self, loader: Iterable[Any], skipped: int) -> Iterator[Any]:
        """Go over a loader again and again; what is skipped has to be read."""
        for epoch in count():
            self._shufflers.begin(epoch)
            is_empty = True
            for batch in start_workers(loader):
                is_empty = False
                if skipped:
                    skipped -= 1
                else:
                    yield batch
            if is_empty:
                raise ConfigError(f"the {self._name} loader gives no batch")


class _SeededConvert(SeededCollate):
    """Converts one item that is a batch already."""

    def __call__(self, item: Any) -> Any:
        return self._seeded(item[0], [item[1]])


def _fingerprint(batch: Any) -> Any:
    """Return what differs for different batches."""
    if isinstance(batch, torch.Tensor) and batch.layout == torch.strided:
        values = batch.detach().cpu().flatten().contiguous().view(torch.uint8)
        return [*batch.shape, blake2b(values.numpy().tobytes()).digest()]
    if isinstance(batch, Mapping):
        batch = [*batch.items()]
    return list(map(_fingerprint, batch)) if isinstance(batch, (list, tuple)) else repr(batch)


class _Numbers:
    """The batches of a loader, as numbers of samples: every `step`-th from `first` on.

    All ranks see the same order, and it goes on over the end of an epoch: so where a run is does
    not depend on how many ranks it has.
    """

    def __init__(
        self, loader: DataLoader[Any], shufflers: "_Shufflers", first: int, step: int, seed: int
    ) -> None:
        sampler: Any = loader.batch_sampler
        self._are_batches = sampler is not None
        batches: Any = sampler if self._are_batches else loader.sampler
        self._batches, self._shufflers, self._seed = batches, shufflers, seed
        self._epoch, self._first = divmod(first, len(batches))
        self._step = step

    def __iter__(self) -> Iterator[Any]:
        return islice(self._all(), self._first, None, self._step)

    def _all(self) -> Iterator[Any]:
        for epoch in count(self._epoch):
            self._shufflers.begin(epoch)
            state = torch.Generator().manual_seed(self._seed + epoch).get_state()
            batches = iter(self._batches)
            while True:
                # A sampler draws from torch's numbers; those of the step must not be in it.
                kept = torch.get_rng_state()
                torch.set_rng_state(state)
                try:
                    numbers = next(batches, None)
                finally:
                    state = torch.get_rng_state()
                    torch.set_rng_state(kept)
                if numbers is None:
                    break
                if self._are_batches:
                    yield [SampleIndex(number, epoch) for number in numbers]
                else:
                    yield SampleIndex(numbers, epoch)


class _Shufflers:
    """What decides the order of a loader, and has to know the epoch."""

    def __init__(self, loader: Any) -> None:
        names = ("sampler", "batch_sampler", "dataset")
        self._all = [loader, *(getattr(loader, name, None) for name in names)]
        generators = (getattr(shuffler, "generator", None) for shuffler in self._all[1:])
        self._generators = [
            (generator, generator.initial_seed())
            for generator in generators
            if isinstance(generator, torch.Generator)
        ]

    def begin(self, epoch: int) -> None:
        """Begin an epoch; a generator of the script's own depends on the epoch only."""
        for shuffler in self._all:
            if callable(set_epoch := getattr(shuffler, "set_epoch", None)):
                set_epoch(epoch)
        for generator, seed in self._generators:
            generator.manual_seed(seed + epoch)
