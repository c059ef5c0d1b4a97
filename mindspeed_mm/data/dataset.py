"""Datasets of conversations with images and videos, and the scan that finds usable records."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from mindspeed.config import ConfigError, build
from mindspeed_llm.data.conversation import MalformedRecord, UnusableRecord
from mindspeed_llm.data.packing import plan_rows
from mindspeed_llm.data.shuffle import SampleOrder
from mindspeed_mm.data.collator import Collator, PositionIds
from mindspeed_mm.data.encoding import Encoder, Sample
from mindspeed_mm.data.media import Modality
from mindspeed_mm.data.options import DatasetOptions
from mindspeed_mm.data.processor import MediaProcessor, load_processor
from mindspeed_mm.data.records import Records, read_records

logger = logging.getLogger(__name__)

SPLIT_SEED = 20
"""The validation split never depends on a run: its records are never trained on."""
SCAN_BATCH = 64
"""Records that a worker scans before it returns the results."""
MAX_LISTED = 10
"""Bad records that are listed one by one."""
FIX_OR_SKIP = "fix {}, or set on_bad_record: skip"


class SkippedRecord(NamedTuple):
    """A record that is not used."""

    where: str
    reason: str
    is_bad: bool = True
    """False for a well-formed record that has nothing to train on."""


class BadRecord(ConfigError):
    """A record cannot be used and `on_bad_record` is stop."""


class RecordStats(NamedTuple):
    """The scan result of one record."""

    modalities: frozenset[Modality] = frozenset()
    length: int = 0
    skipped: SkippedRecord | None = None
    error: ConfigError | None = None
    """What stops the run; returned and not raised, so that no rank waits for one that is gone."""


@dataclass
class DatasetStats:
    """The usable records, their lengths in tokens and their modalities."""

    usable: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    modalities: frozenset[Modality] = frozenset()
    skipped: list[SkippedRecord] = field(default_factory=list)


class _RecordScan(Dataset[RecordStats]):
    """Scan results as a dataset, so that the workers of a DataLoader share the work."""

    def __init__(
        self, records: Records, encoder: Encoder, needs_lengths: bool, indices: Sequence[int]
    ) -> None:
        self._records, self._encoder, self._needs_lengths = records, encoder, needs_lengths
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, item: int) -> RecordStats:
        records, index = self._records, self._indices[item]
        try:
            record, folder = records[index], records.folder(index)
            if self._needs_lengths:
                sample = self._encoder.encode(record, folder)
                return RecordStats(sample.modalities, len(sample))
            parsed = self._encoder.parse(record, folder)
            return RecordStats(frozenset(medium.modality for medium in parsed.media))
        except (MalformedRecord, UnusableRecord) as error:
            is_bad = isinstance(error, MalformedRecord)
            return RecordStats(skipped=SkippedRecord(records.where(index), str(error), is_bad))
        except ConfigError as error:
            return RecordStats(error=error)


def scan_records(
    records: Records,
    encoder: Encoder,
    *,
    needs_lengths: bool,
    stop_on_bad: bool,
    workers: int = 0,
) -> DatasetStats:
    """Check every record; `needs_lengths` also opens its images, for its length in tokens."""
    found = DatasetStats()
    is_shared = needs_lengths and dist.is_available() and dist.is_initialized()
    scan = _scan_on_all_ranks if is_shared else _scan
    for index, stats in enumerate(scan(records, encoder, needs_lengths, workers)):
        if stats.error is not None:
            raise stats.error
        if stats.skipped is None:
            found.usable.append(index)
            found.lengths.append(stats.length)
            found.modalities |= stats.modalities
        else:
            found.skipped.append(stats.skipped)
    bad = [skipped for skipped in found.skipped if skipped.is_bad]
    if bad and stop_on_bad:
        raise BadRecord(_list_bad(bad))
    if found.skipped:
        logger.warning("%s", summarize(found.skipped, len(records)))
    if not found.usable:
        raise BadRecord(f"none of the {len(records)} records is usable: {_list_bad(found.skipped)}")
    return found


def _scan(
    records: Records,
    encoder: Encoder,
    needs_lengths: bool,
    workers: int,
    part: slice = slice(None),
) -> Iterator[RecordStats]:
    indices = range(len(records))[part]
    batches: Iterable[list[RecordStats]] = DataLoader(
        _RecordScan(records, encoder, needs_lengths, indices),
        batch_size=SCAN_BATCH,
        collate_fn=list,
        num_workers=min(workers, len(indices)),
    )
    return chain.from_iterable(batches)


def _scan_on_all_ranks(
    records: Records, encoder: Encoder, needs_lengths: bool, workers: int
) -> Iterator[RecordStats]:
    """Split the records among all ranks: opening every image takes time."""
    rank, world = dist.get_rank(), dist.get_world_size()
    local = list(_scan(records, encoder, needs_lengths, workers, slice(rank, None, world)))
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, local)
    return (parts[index % world][index // world] for index in range(len(records)))


def summarize(skipped: Sequence[SkippedRecord], total: int) -> str:
    """Return how many records are skipped, by reason."""
    reasons = Counter(one.reason for one in skipped)
    first = {one.reason: one.where for one in reversed(skipped)}
    rows = [f"{n} x {why} (first: {first[why]})" for why, n in reasons.most_common(MAX_LISTED)]
    return f"{len(skipped)} of {total} records are skipped: {'; '.join(rows)}"


def _list_bad(bad: Sequence[SkippedRecord]) -> str:
    lines = [f"{one.where}: {one.reason}" for one in bad[:MAX_LISTED]]
    if len(bad) > MAX_LISTED:
        lines.append(f"and {len(bad) - MAX_LISTED} more")
    return "; ".join([*lines, FIX_OR_SKIP.format("them")])  # an error is one line


Outcome = Sample | SkippedRecord


@dataclass(frozen=True)
class Source:
    """Records and their encoder, and whether a bad record stops the run."""

    records: Records
    encoder: Encoder
    processor: MediaProcessor
    stop_on_bad: bool

    def outcome(self, index: int) -> Outcome:
        """Return the sample of a record, or why it is skipped."""
        try:
            return self.encoder.encode(self.records[index], self.records.folder(index))
        except UnusableRecord as error:
            return SkippedRecord(self.records.where(index), str(error), is_bad=False)
        except MalformedRecord as error:
            where = self.records.where(index)
            if self.stop_on_bad:
                raise BadRecord(f"{where}: {error}; {FIX_OR_SKIP.format('it')}") from None
            return SkippedRecord(where, str(error))


class ConversationDataset(Dataset[list[Outcome]]):
    """Items are the samples of a row: one, or several that are packed together."""

    def __init__(
        self,
        source: Source,
        rows: Sequence[Sequence[int]],
        modalities: frozenset[Modality],
        skipped: Sequence[SkippedRecord] = (),
        position_ids: PositionIds | None = None,
    ) -> None:
        self._source, self._rows, self._position_ids = source, rows, position_ids
        self.modalities = modalities
        """Modalities that occur in the records."""
        self.skipped = list(skipped)
        """Records that the scan skipped."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> list[Outcome]:
        return [self._source.outcome(number) for number in self._rows[index]]

    def collator(self, multiple: int) -> Collator:
        """Return the collator for the samples of this dataset."""
        return Collator(
            self._source.processor,
            self.modalities,
            multiple=multiple,
            position_ids=self._position_ids,
        )


Datasets = ConversationDataset | tuple[ConversationDataset, ConversationDataset]


def build_mm_dataset(dataset_param: DatasetOptions | Mapping[str, Any]) -> Datasets:
    """Build the dataset of `dataset_param`: one, or one for training and one for validation."""
    options = (
        dataset_param
        if isinstance(dataset_param, DatasetOptions)
        else build(DatasetOptions, dataset_param, source="dataset_param")
    )
    parameters = options.preprocess_parameters
    return build_datasets(options, MediaProcessor(load_processor(parameters), parameters))


def build_datasets(options: DatasetOptions, processor: MediaProcessor) -> Datasets:
    """Build the datasets for a loaded processor."""
    basic = options.basic_parameters
    if basic.packing and basic.cutoff_len is None:
        raise ConfigError("packing fills rows of cutoff_len tokens: set it, or --seq-length")
    encoder = Encoder(options, processor)

    def scan(paths: Sequence[str], limit: int | None) -> tuple[Source, DatasetStats]:
        records = read_records(paths, basic.dataset_dir, limit)
        stop_on_bad = basic.on_bad_record == "stop"
        stats = scan_records(
            records,
            encoder,
            needs_lengths=basic.packing,
            stop_on_bad=stop_on_bad,
            workers=basic.preprocessing_num_workers or 0,
        )
        return Source(records, encoder, processor, stop_on_bad), stats

    position_ids = PositionIds(processor.facts.source) if basic.packing else None
    capacity = basic.cutoff_len if basic.packing else None
    source, stats = scan(basic.dataset, basic.max_samples)
    if basic.val_dataset:
        other = scan(basic.val_dataset, basic.val_max_samples)
        valid = _make(*other, list(range(len(other[1].usable))), capacity, position_ids)
        return _make(source, stats, list(range(len(stats.usable))), capacity, position_ids), valid
    if basic.val_rate is None:
        return _make(source, stats, list(range(len(stats.usable))), capacity, position_ids)
    kept, held_out = _split(len(stats.usable), basic.val_rate, basic.val_max_samples)
    train = _make(source, stats, kept, capacity, position_ids)
    return train, _make(source, stats, held_out, capacity, position_ids)


def _split(size: int, rate: float, limit: int | None) -> tuple[list[int], list[int]]:
    """Return the indices for training and for validation, each in ascending order."""
    count = min(max(1, round(size * rate)), limit or size)
    if count >= size:
        raise ConfigError(f"val_rate {rate} leaves none of {size} records for training")
    order = SampleOrder(size, seed=SPLIT_SEED)
    held_out = sorted(order[position] for position in range(count))
    excluded = set(held_out)
    return [index for index in range(size) if index not in excluded], held_out


def _make(
    source: Source,
    stats: DatasetStats,
    indices: Sequence[int],
    capacity: int | None,
    position_ids: PositionIds | None,
) -> ConversationDataset:
    if capacity is None:
        rows = [[stats.usable[index]] for index in indices]
    else:
        plan = plan_rows([stats.lengths[index] for index in indices], capacity)
        rows = [[stats.usable[indices[member]] for member in row] for row in plan]
    return ConversationDataset(source, rows, stats.modalities, stats.skipped, position_ids)
