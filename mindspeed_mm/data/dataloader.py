"""Micro-batches of one rank, resumable on any number of ranks.

The random numbers of a sample follow from the seed, the epoch and its index only: augmentations are
the same in this process and in workers, and after a resume.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from mindspeed.config import ConfigError, build
from mindspeed.launch.process import start_worker, start_workers
from mindspeed_llm.data.indexed import IGNORE_INDEX
from mindspeed_llm.data.shuffle import SampleOrder
from mindspeed_mm.data.collator import Batch
from mindspeed_mm.data.dataset import (
    MAX_LISTED,
    BadRecord,
    ConversationDataset,
    Outcome,
    SkippedRecord,
)
from mindspeed_mm.data.options import DataloaderOptions, DatasetOptions

logger = logging.getLogger(__name__)


class SampleIndex(NamedTuple):
    """The index of a dataset item, in an epoch."""

    item: Any
    epoch: int
    is_filler: bool = False
    """Only there to give all ranks the same number of items: not trained on."""

    def __repr__(self) -> str:
        # Random numbers are seeded with this text: another one would change every augmentation,
        # and a run could not resume bit-exactly.
        return f"Place(item={self.item!r}, epoch={self.epoch!r}, fills_in={self.is_filler!r})"


@contextmanager
def seeded_rng(*key: Any) -> Iterator[None]:
    """Seed torch, numpy and random from a key; restore their states afterwards."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    seed = int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    # Not torch.manual_seed: it would also seed the devices, whose RNG is the model's.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


class SeededDataset(Dataset[tuple[Any, SampleIndex]]):
    """The items of a dataset, each made with the random numbers of its index.

    Attributes are those of the dataset: a script's `worker_init_fn` may read and set them.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.__dict__.update(_dataset=dataset, _seed=seed)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: SampleIndex) -> tuple[Any, SampleIndex]:
        with seeded_rng(self._seed, "item", index):
            return self._dataset[index.item], index

    def __getattr__(self, name: str) -> Any:
        # Not __getitems__, which would bypass the seeds; not what pickle looks up.
        if name.startswith("__") or "_dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


class SeededCollate:
    """Collates items of a SeededDataset with the random numbers of their indices."""

    def __init__(self, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._collate, self._seed = collate, seed

    def __call__(self, items: Sequence[tuple[Any, SampleIndex]]) -> Any:
        return self._seeded([item for item, _ in items], [index for _, index in items])

    def _seeded(self, batch: Any, indices: list[SampleIndex]) -> Any:
        with seeded_rng(self._seed, "batch", indices):
            return self._collate(batch)


class MicroBatchSampler(Sampler[list[SampleIndex]]):
    """The indices of this rank's micro-batches.

    The position counts the items that all ranks have consumed together, over all epochs. Ranks
    alternate in chunks of `batch_size` items, so another number of ranks resumes from it without
    skipping or repeating any.
    """

    def __init__(self, total: int, options: DataloaderOptions, rank: int, world: int) -> None:
        shuffle = options.shuffle and options.sampler_type != "SequentialSampler"
        self._order = SampleOrder(total, seed=options.seed, shuffle=shuffle)
        self._total, self._size, self._rank, self._world = total, options.batch_size, rank, world
        self._keeps_last = not options.drop_last
        self.position = 0

    @property
    def step(self) -> int:
        """Items that all ranks consume together in one micro-batch."""
        return self._size * self._world

    def __len__(self) -> int:
        """Return the number of micro-batches in an epoch."""
        return -(-self._total // self.step)

    def __iter__(self) -> Iterator[list[SampleIndex]]:
        # Read once: the position advances while batches are prepared ahead of it.
        for start in range(self.position, self.end_of_epoch(self.position), self.step):
            yield self._batch(start)

    def end_of_epoch(self, position: int) -> int:
        """Return the position at which the epoch of a position ends."""
        return (position // self._total + 1) * self._total

    def after(self, position: int) -> int:
        """Return the position after the micro-batches at a position."""
        following = position + self.step
        return min(following, self.end_of_epoch(position)) if self._keeps_last else following

    def _batch(self, start: int) -> list[SampleIndex]:
        first = start + self._rank * self._size
        end = first + self._size
        if self._keeps_last:
            end = min(end, self.end_of_epoch(start))
        real = [self._index(position) for position in range(first, end)]
        return real or [self._index(start)._replace(is_filler=True)]

    def _index(self, position: int) -> SampleIndex:
        return SampleIndex(self._order[position], position // self._total)


class SkippedRecords:
    """Counts the records that ranks skip while training; logs them per epoch and in total."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.count = 0
        """Records that this rank skipped."""
        self._new: list[SkippedRecord] = []
        self._new_count = 0
        self._total = 0
        self._has_usable = False
        """Whether a batch of this rank had anything to train on."""

    def add(self, skipped: Sequence[SkippedRecord], batch: Any) -> None:
        """Count records of this rank, which were to be in a batch."""
        if not self._has_usable:
            self._has_usable = not skipped or bool((batch["labels"] != IGNORE_INDEX).any())
        for record in skipped:
            self.count += 1
            if self.count <= MAX_LISTED:
                logger.warning(
                    "skipped record (%d so far): %s: %s", self.count, record.where, record.reason
                )
        self._new_count += len(skipped)
        self._new += skipped[: MAX_LISTED - len(self._new)]

    def report(self, when: str, *, is_complete: bool = True) -> None:
        """Log what all ranks skipped since the last report; every rank has to call it.

        That all records so far were skipped is an error, unless more were to follow.
        """
        parts = self._all_ranks()
        self._new, self._new_count = [], 0
        if not (count := sum(number for number, _, _ in parts)):
            return
        self._total += count
        first = [f"{one.where}: {one.reason}" for _, found, _ in parts for one in found]
        first = first[:MAX_LISTED]
        more = f"; and {count - len(first)} more" if count > len(first) else ""
        if is_complete and not any(has_usable for _, _, has_usable in parts):
            raise BadRecord(
                f"{when}: none of the {self._total} records could be used, so nothing was learned: "
                f"{'; '.join(first)}{more}: correct them, or raise cutoff_len (--seq-length)"
            )
        logger.warning(
            *("%s: %d record(s) skipped by all ranks, %d in total: %s%s", when, count),
            *(self._total, "; ".join(first), more),
        )

    def _all_ranks(self) -> list[tuple[int, list[SkippedRecord], bool]]:
        local = (self._new_count, self._new, self._has_usable)
        if self._group is None:
            return [local]
        parts: list[Any] = [None] * self._group.size()
        dist.all_gather_object(parts, local, group=self._group)
        return parts


class MicroBatchLoader:
    """Yields the rest of the current epoch's micro-batches each time it is iterated."""

    def __init__(
        self,
        batches: DataLoader[Any],
        sampler: MicroBatchSampler,
        seed: int,
        skipped: SkippedRecords,
    ) -> None:
        self._batches, self._sampler, self._seed = batches, sampler, seed
        self.dataset = batches.dataset
        self._skipped = skipped
        self._is_resumed: bool | None = None

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        epoch, offset = divmod(self._sampler.position, self.samples_per_epoch)
        if self._is_resumed is None:
            self._is_resumed = self._sampler.position > 0
        for batch, skipped in start_workers(self._batches):
            if isinstance(batch, ConfigError):
                raise batch
            # Counted here and not where it is prepared: workers prepare ahead.
            self._sampler.position = self._sampler.after(self._sampler.position)
            self._skipped.add(skipped, batch)
            yield batch
        self._skipped.report(f"epoch {epoch + 1}", is_complete=offset == 0)

    @property
    def skipped(self) -> int:
        """Unusable records that this rank skipped so far."""
        return self._skipped.count

    def finish(self, *, is_complete: bool = True) -> None:
        """Report the records skipped since the last epoch; every rank has to call it."""
        is_whole = is_complete and not self._is_resumed  # the rest may be a few bad records
        self._skipped.report("end of training", is_complete=is_whole)

    @property
    def consumed_samples(self) -> int:
        """Items that all ranks have consumed together, over all epochs."""
        return self._sampler.position

    @consumed_samples.setter
    def consumed_samples(self, position: int) -> None:
        self._sampler.position = position

    @property
    def samples_per_epoch(self) -> int:
        """Items of an epoch, of all ranks."""
        return len(self.dataset)  # type: ignore[arg-type]  # build_mm_dataloader checks the length

    def state_dict(self) -> dict[str, int]:
        """Return the position, and the size and seed of the data it refers to."""
        size = self.samples_per_epoch
        return {"consumed_samples": self.consumed_samples, "seed": self._seed, "size": size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from a position; data of another size or seed is an error."""
        own = self.state_dict()
        for name in {"seed", "size"} & state.keys():
            if state[name] != own[name]:
                raise ConfigError(
                    f"the checkpoint was saved with data of {name} {state[name]}, this run has "
                    f"{own[name]}: its position is not valid here; use the same data and seed, or "
                    "start from the beginning"
                )
        self.consumed_samples = state["consumed_samples"]


class _Items(SeededDataset):
    """Returns a ConfigError as an item: raised in a worker, its message would be buried."""

    def __getitem__(self, index: SampleIndex) -> tuple[Any, SampleIndex]:
        try:
            return super().__getitem__(index)
        except ConfigError as error:
            return error, index


class _Collate:
    """Collates, and returns a ConfigError in place of a batch."""

    def __init__(self, collate: Callable[[Sequence[Any]], tuple[Any, list[SkippedRecord]]]) -> None:
        self._collate = collate

    def __call__(self, items: Sequence[tuple[Any, SampleIndex]]) -> tuple[Any, list[SkippedRecord]]:
        try:
            for item, _ in items:
                if isinstance(item, ConfigError):
                    raise item
            return self._collate(items)
        except ConfigError as error:
            return error, []


class _ConversationCollate:
    """Collates conversations, and returns the skipped records with the batch."""

    def __init__(self, collate: Callable[[Sequence[Any]], Batch]) -> None:
        self._collate = collate

    def __call__(
        self, items: Sequence[tuple[list[Outcome], SampleIndex]]
    ) -> tuple[Batch, list[SkippedRecord]]:
        outcomes = [(one, index.is_filler) for item, index in items for one in item]
        samples = [
            one.without_labels() if is_filler else one
            for one, is_filler in outcomes
            if not isinstance(one, SkippedRecord)
        ]
        skipped = [
            one for one, is_filler in outcomes if isinstance(one, SkippedRecord) and not is_filler
        ]
        return self._collate(samples), skipped


class _DatasetCollate:
    """Collates the items of any dataset, by its own `collate_fn` if it has one."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._collate = SeededCollate(getattr(dataset, "collate_fn", None) or default_collate, seed)

    def __call__(self, items: Sequence[tuple[Any, SampleIndex]]) -> tuple[Any, list[SkippedRecord]]:
        return self._collate(items), []


def build_mm_dataloader(
    dataset: Any,
    dataloader_param: DataloaderOptions | Mapping[str, Any],
    process_group: dist.ProcessGroup | None = None,
    consumed_samples: int = 0,
    dataset_param: DatasetOptions | Mapping[str, Any] | None = None,
    generator: torch.Generator | None = None,
) -> MicroBatchLoader:
    """Build the loader of this rank of `process_group`, default the data-parallel group.

    `dataset` is ours or any with a length; `dataset_param` is not needed for either.
    """
    options = (
        dataloader_param
        if isinstance(dataloader_param, DataloaderOptions)
        else build(DataloaderOptions, dataloader_param, source="dataloader_param")
    )
    if not hasattr(dataset, "__len__") or not len(dataset):
        raise ConfigError(
            f"a {type(dataset).__name__} without a length or without items cannot be split "
            "among ranks: give a dataset with both"
        )
    group = _data_parallel_group(process_group)
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    sampler = MicroBatchSampler(len(dataset), options, rank, world)
    sampler.position = consumed_samples
    collate: Any = _DatasetCollate(dataset, options.seed)
    if has_records := isinstance(dataset, ConversationDataset):
        collate = _ConversationCollate(dataset.collator(options.collate_param.pad_to_multiple_of))
    persistent = options.persistent_workers is not False and options.num_workers > 0
    batches = DataLoader(
        _Items(dataset, options.seed),
        batch_sampler=sampler,
        collate_fn=_Collate(collate),
        num_workers=options.num_workers,
        pin_memory=options.pin_memory,
        prefetch_factor=options.prefetch_factor if options.num_workers else None,
        persistent_workers=persistent,
        worker_init_fn=partial(start_worker, None),
        # Otherwise it would draw from the RNG of the train step each time it begins.
        generator=generator or torch.Generator().manual_seed(options.seed),
    )
    skipped = SkippedRecords(group if has_records else None)
    return MicroBatchLoader(batches, sampler, options.seed, skipped)


def _data_parallel_group(given: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the given group, else Megatron's data-parallel one, else all ranks."""
    if given is not None or not (dist.is_available() and dist.is_initialized()):
        return given
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
        return group
    return dist.group.WORLD
