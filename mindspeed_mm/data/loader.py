"""Micro-batches of one rank, from a position that means the same to any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler, default_collate

from mindspeed.config import ConfigError, build
from mindspeed.launch.process import start_worker, start_workers
from mindspeed_llm.data.shuffle import SampleOrder
from mindspeed_mm.data.collate import Batch
from mindspeed_mm.data.dataset import ConversationDataset, Outcome
from mindspeed_mm.data.draws import Place, PlacedCollate, PlacedItems
from mindspeed_mm.data.left_out import LeftOut
from mindspeed_mm.data.options import DataloaderOptions, DatasetOptions
from mindspeed_mm.data.survey import Skipped


class BatchOrder(Sampler[list[Place]]):
    """Which items this rank's micro-batches hold.

    A position counts the items that all ranks have consumed together, over all epochs. Ranks take
    turns of `size` items, so another number of ranks goes on from it and misses nothing.
    """

    def __init__(self, total: int, options: DataloaderOptions, rank: int, world: int) -> None:
        shuffle = options.shuffle and options.sampler_type != "SequentialSampler"
        self._order = SampleOrder(total, seed=options.seed, shuffle=shuffle)
        self._total, self._size, self._rank, self._world = total, options.batch_size, rank, world
        self._fills = not options.drop_last
        self.position = 0

    @property
    def step(self) -> int:
        """Items that all ranks take together."""
        return self._size * self._world

    def __len__(self) -> int:
        """The number of micro-batches from an epoch's beginning to its end."""
        return -(-self._total // self.step)

    def __iter__(self) -> Iterator[list[Place]]:
        # Taken once: the position moves on while batches are prepared ahead of it.
        for start in range(self.position, self.end_of_epoch(self.position), self.step):
            yield self._batch(start)

    def end_of_epoch(self, position: int) -> int:
        """Return where the epoch of a position ends."""
        return (position // self._total + 1) * self._total

    def after(self, position: int) -> int:
        """Return the position behind the batches at a position."""
        behind = position + self.step
        return min(behind, self.end_of_epoch(position)) if self._fills else behind

    def _batch(self, start: int) -> list[Place]:
        first = start + self._rank * self._size
        end = first + self._size
        if self._fills:
            end = min(end, self.end_of_epoch(start))
        real = [self._place(position) for position in range(first, end)]
        return real or [self._place(start)._replace(fills_in=True)]

    def _place(self, position: int) -> Place:
        return Place(self._order[position], position // self._total)


class MicroBatchLoader:
    """Yields the micro-batches of an epoch each time it is iterated, from where it stands."""

    def __init__(
        self, batches: DataLoader[Any], order: BatchOrder, seed: int, left_out: LeftOut
    ) -> None:
        self._batches, self._order, self._seed = batches, order, seed
        self.dataset = batches.dataset
        self._left_out = left_out

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        epoch = self._order.position // self.samples_per_epoch + 1
        for batch, skipped in start_workers(self._batches):
            if isinstance(batch, ConfigError):
                raise batch
            # Counted here and not where it is prepared: processes prepare ahead.
            self._order.position = self._order.after(self._order.position)
            self._left_out.add(skipped)
            yield batch
        self._left_out.tell(f"epoch {epoch}")

    @property
    def skipped(self) -> int:
        """Records that this rank left out so far because they could not be used."""
        return self._left_out.count

    def finish(self) -> None:
        """Tell what was left out since the last epoch; every rank has to call it."""
        self._left_out.tell("at the end")

    @property
    def consumed_samples(self) -> int:
        """Items that all ranks have consumed together, over all epochs."""
        return self._order.position

    @consumed_samples.setter
    def consumed_samples(self, position: int) -> None:
        self._order.position = position

    @property
    def samples_per_epoch(self) -> int:
        """Items of an epoch, of all ranks."""
        return len(self.dataset)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, int]:
        """Return the position, with what it is a position in."""
        size = self.samples_per_epoch
        return {"consumed_samples": self.consumed_samples, "seed": self._seed, "size": size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a position; data of another size or order is refused."""
        own = self.state_dict()
        for name in {"seed", "size"} & state.keys():
            if state[name] != own[name]:
                raise ConfigError(
                    f"the data had {name} {state[name]} and has {own[name]} now: a position in it "
                    "means nothing; take the same data and seed, or start at the beginning"
                )
        self.consumed_samples = state["consumed_samples"]


class _Items(PlacedItems):
    """Placed items; an error that a user can put right is one, for a worker would bury it."""

    def __getitem__(self, place: Place) -> tuple[Any, Place]:
        try:
            return super().__getitem__(place)
        except ConfigError as error:
            return error, place


class _Told:
    """Collates, and hands on errors that a user can put right."""

    def __init__(self, collate: Callable[[Sequence[Any]], tuple[Any, list[Skipped]]]) -> None:
        self._collate = collate

    def __call__(self, items: Sequence[tuple[Any, Place]]) -> tuple[Any, list[Skipped]]:
        try:
            for item, _ in items:
                if isinstance(item, ConfigError):
                    raise item
            return self._collate(items)
        except ConfigError as error:
            return error, []


class _Conversations:
    """Collates conversations, and hands on which records were left out."""

    def __init__(self, collate: Callable[[Sequence[Any]], Batch]) -> None:
        self._collate = collate

    def __call__(self, items: Sequence[tuple[list[Outcome], Place]]) -> tuple[Batch, list[Skipped]]:
        outcomes = [(one, place.fills_in) for item, place in items for one in item]
        samples = [
            one.unlearnt() if fills_in else one
            for one, fills_in in outcomes
            if not isinstance(one, Skipped)
        ]
        skipped = [one for one, fills_in in outcomes if isinstance(one, Skipped) and not fills_in]
        return self._collate(samples), skipped


class _Others:
    """Collates the items of any data set, by its own `collate_fn` if it has one."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._collate = PlacedCollate(getattr(dataset, "collate_fn", None) or default_collate, seed)

    def __call__(self, items: Sequence[tuple[Any, Place]]) -> tuple[Any, list[Skipped]]:
        return self._collate(items), []


def build_mm_dataloader(
    dataset: Any,
    dataloader_param: DataloaderOptions | Mapping[str, Any],
    process_group: dist.ProcessGroup | None = None,
    consumed_samples: int = 0,
    dataset_param: DatasetOptions | Mapping[str, Any] | None = None,
    generator: torch.Generator | None = None,
) -> MicroBatchLoader:
    """Build the loader of this rank of `process_group`, or else of its data-parallel group.

    `dataset` is ours or any with a length; `dataset_param` is not needed for either.
    """
    options = (
        dataloader_param
        if isinstance(dataloader_param, DataloaderOptions)
        else build(DataloaderOptions, dataloader_param, source="dataloader_param")
    )
    if not hasattr(dataset, "__len__") or not len(dataset):
        raise ConfigError(
            f"a {type(dataset).__name__} without a length or without items cannot be shared out "
            "among ranks: give a data set with both"
        )
    group = _group(process_group)
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    order = BatchOrder(len(dataset), options, rank, world)
    order.position = consumed_samples
    collate: Any = _Others(dataset, options.seed)
    if has_records := isinstance(dataset, ConversationDataset):
        collate = _Conversations(dataset.collator(options.collate_param.pad_to_multiple_of))
    persistent = options.persistent_workers is not False and options.num_workers > 0
    batches = DataLoader(
        _Items(dataset, options.seed),
        batch_sampler=order,
        collate_fn=_Told(collate),
        num_workers=options.num_workers,
        pin_memory=options.pin_memory,
        prefetch_factor=options.prefetch_factor if options.num_workers else None,
        persistent_workers=persistent,
        worker_init_fn=partial(start_worker, None),
        # Else it would draw a number of the step's each time it begins.
        generator=generator or torch.Generator().manual_seed(options.seed),
    )
    return MicroBatchLoader(batches, order, options.seed, LeftOut(group if has_records else None))


def _group(given: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group that shares the data: the one given, else Megatron's data-parallel one."""
    if given is not None or not (dist.is_available() and dist.is_initialized()):
        return given
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
        return group
    return dist.group.WORLD
