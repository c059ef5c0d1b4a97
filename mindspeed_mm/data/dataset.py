"""Data sets of conversations with images and videos, made from data.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from mindspeed.config import ConfigError, build
from mindspeed_llm.data.conversation import MalformedRecord, UnusableRecord
from mindspeed_llm.data.packing import plan_rows
from mindspeed_llm.data.shuffle import SampleOrder
from mindspeed_mm.data.collate import Collator
from mindspeed_mm.data.encoding import Encoder, Sample
from mindspeed_mm.data.media import Kind
from mindspeed_mm.data.options import DatasetOptions
from mindspeed_mm.data.positions import PositionCounter
from mindspeed_mm.data.processor import MediaProcessor, load_processor
from mindspeed_mm.data.records import Records, read_records
from mindspeed_mm.data.survey import BadRecord, Skipped, Survey, survey

SPLIT_SEED = 20
"""Which records validate never depends on a run: none of them is ever trained on."""

Outcome = Sample | Skipped


@dataclass(frozen=True)
class Source:
    """Records, what makes samples of them, and what is done with those that cannot be used."""

    records: Records
    encoder: Encoder
    processor: MediaProcessor
    stops: bool

    def outcome(self, index: int) -> Outcome:
        """Make the sample of a record, or say why it is left out."""
        try:
            return self.encoder.encode(self.records[index], self.records.folder(index))
        except UnusableRecord as error:
            return Skipped(self.records.place(index), str(error), is_bad=False)
        except MalformedRecord as error:
            place = self.records.place(index)
            if self.stops:
                raise BadRecord(
                    f"{place}: {error}; put it right, or say on_bad_record: skip"
                ) from None
            return Skipped(place, str(error))


class ConversationDataset(Dataset[list[Outcome]]):
    """Items are the samples of a row: one, or several that are packed together."""

    def __init__(
        self,
        source: Source,
        rows: Sequence[Sequence[int]],
        kinds: frozenset[Kind],
        skipped: Sequence[Skipped] = (),
        positions: PositionCounter | None = None,
    ) -> None:
        self._source, self._rows, self._positions = source, rows, positions
        self.kinds = kinds
        """Kinds of media that the records have."""
        self.skipped = list(skipped)
        """Records that were left out at the beginning."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> list[Outcome]:
        return [self._source.outcome(number) for number in self._rows[index]]

    def collator(self, multiple: int) -> Collator:
        """Return what makes batches of the samples."""
        return Collator(
            self._source.processor, self.kinds, multiple=multiple, positions=self._positions
        )


Datasets = ConversationDataset | tuple[ConversationDataset, ConversationDataset]


def build_mm_dataset(dataset_param: DatasetOptions | Mapping[str, Any]) -> Datasets:
    """Build the data set of `dataset_param`: one, or for training and for validation."""
    options = (
        dataset_param
        if isinstance(dataset_param, DatasetOptions)
        else build(DatasetOptions, dataset_param, source="dataset_param")
    )
    parameters = options.preprocess_parameters
    return open_datasets(options, MediaProcessor(load_processor(parameters), parameters))


def open_datasets(options: DatasetOptions, processor: MediaProcessor) -> Datasets:
    """Build the data sets for a processor that is there already."""
    basic = options.basic_parameters
    if basic.packing and basic.cutoff_len is None:
        raise ConfigError("packing fills rows of cutoff_len tokens: give it, or --seq-length")
    encoder = Encoder(options, processor)

    def look(paths: Sequence[str], limit: int | None) -> tuple[Source, Survey]:
        records = read_records(paths, basic.dataset_dir, limit)
        stops = basic.on_bad_record == "stop"
        workers = basic.preprocessing_num_workers or 0
        found = survey(records, encoder, measures=basic.packing, stops=stops, workers=workers)
        return Source(records, encoder, processor, stops), found

    counter = PositionCounter(processor.facts.source) if basic.packing else None
    capacity = basic.cutoff_len if basic.packing else None
    source, found = look(basic.dataset, basic.max_samples)
    if basic.val_dataset:
        other = look(basic.val_dataset, basic.val_max_samples)
        valid = _make(*other, list(range(len(other[1].usable))), capacity, counter)
        return _make(source, found, list(range(len(found.usable))), capacity, counter), valid
    if basic.val_rate is None:
        return _make(source, found, list(range(len(found.usable))), capacity, counter)
    kept, held = _split(len(found.usable), basic.val_rate, basic.val_max_samples)
    train = _make(source, found, kept, capacity, counter)
    return train, _make(source, found, held, capacity, counter)


def _split(size: int, rate: float, limit: int | None) -> tuple[list[int], list[int]]:
    """Choose what is for training and what for validation, each in its old order."""
    count = min(max(1, round(size * rate)), limit or size)
    if count >= size:
        raise ConfigError(f"val_rate {rate} leaves nothing of {size} records for training")
    order = SampleOrder(size, seed=SPLIT_SEED)
    held = sorted(order[place] for place in range(count))
    taken = set(held)
    return [place for place in range(size) if place not in taken], held


def _make(
    source: Source,
    found: Survey,
    places: Sequence[int],
    capacity: int | None,
    counter: PositionCounter | None,
) -> ConversationDataset:
    if capacity is None:
        rows = [[found.usable[place]] for place in places]
    else:
        plan = plan_rows([found.sizes[place] for place in places], capacity)
        rows = [[found.usable[places[member]] for member in row] for row in plan]
    return ConversationDataset(source, rows, found.kinds, found.skipped, counter)
