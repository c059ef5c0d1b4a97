"""A look at all records before training: which can be used, what media they have, their lengths."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from mindspeed.config import ConfigError
from mindspeed_llm.data.conversation import MalformedRecord, UnusableRecord
from mindspeed_mm.data.encoding import Encoder
from mindspeed_mm.data.media import Kind
from mindspeed_mm.data.records import Records

logger = logging.getLogger(__name__)

AT_ONCE = 64
"""How many records a process looks at before it tells."""
SHOWN = 10
"""How many bad records are named one by one."""


class Skipped(NamedTuple):
    """A record that was left out."""

    place: str
    reason: str
    is_bad: bool = True
    """False for one that is well formed, but of no use for training."""


class BadRecord(ConfigError):
    """A record cannot be used and `on_bad_record` is stop."""


class Finding(NamedTuple):
    """What a record turned out to be."""

    kinds: frozenset[Kind] = frozenset()
    size: int = 0
    skipped: Skipped | None = None
    error: ConfigError | None = None
    """What stops the run; handed on and not raised, so that no rank waits for one that is gone."""


@dataclass
class Survey:
    """The records that can be used."""

    usable: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    kinds: frozenset[Kind] = frozenset()
    skipped: list[Skipped] = field(default_factory=list)


class _Looks(Dataset[Finding]):
    """Records as findings; a data set, so that a loader's processes can share the work."""

    def __init__(
        self, records: Records, encoder: Encoder, measures: bool, chosen: Sequence[int]
    ) -> None:
        self._records, self._encoder, self._measures = records, encoder, measures
        self._chosen = chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, place: int) -> Finding:
        records, index = self._records, self._chosen[place]
        try:
            record, folder = records[index], records.folder(index)
            if self._measures:
                sample = self._encoder.encode(record, folder)
                return Finding(sample.kinds, len(sample))
            request = self._encoder.read(record, folder)
            return Finding(frozenset(medium.kind for medium in request.media))
        except (MalformedRecord, UnusableRecord) as error:
            is_bad = isinstance(error, MalformedRecord)
            return Finding(skipped=Skipped(records.place(index), str(error), is_bad))
        except ConfigError as error:
            return Finding(error=error)


def survey(
    records: Records, encoder: Encoder, *, measures: bool, stops: bool, workers: int = 0
) -> Survey:
    """Look at every record; with `measures` also at its images, for its length in tokens."""
    found = Survey()
    is_shared = measures and dist.is_available() and dist.is_initialized()
    look = _look_together if is_shared else _look
    for index, finding in enumerate(look(records, encoder, measures, workers)):
        if finding.error is not None:
            raise finding.error
        if finding.skipped is None:
            found.usable.append(index)
            found.sizes.append(finding.size)
            found.kinds |= finding.kinds
        else:
            found.skipped.append(finding.skipped)
    bad = [skipped for skipped in found.skipped if skipped.is_bad]
    if bad and stops:
        raise BadRecord(_told(bad))
    if found.skipped:
        logger.warning("%s", summary(found.skipped, len(records)))
    if not found.usable:
        raise BadRecord(f"none of the {len(records)} records can be used: {_told(found.skipped)}")
    return found


def _look(
    records: Records, encoder: Encoder, measures: bool, workers: int, part: slice = slice(None)
) -> Iterator[Finding]:
    chosen = range(len(records))[part]
    looks: Iterable[list[Finding]] = DataLoader(
        _Looks(records, encoder, measures, chosen),
        batch_size=AT_ONCE,
        collate_fn=list,
        num_workers=min(workers, len(chosen)),
    )
    return chain.from_iterable(looks)


def _look_together(
    records: Records, encoder: Encoder, measures: bool, workers: int
) -> Iterator[Finding]:
    """Share the records out among all ranks: to open every image takes time."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = list(_look(records, encoder, measures, workers, slice(rank, None, world)))
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, mine)
    return (parts[index % world][index // world] for index in range(len(records)))


def summary(skipped: Sequence[Skipped], total: int) -> str:
    """Say how many records were left out, and why."""
    reasons = Counter(one.reason for one in skipped)
    first = {one.reason: one.place for one in reversed(skipped)}
    told = [f"{count} x {why} (first: {first[why]})" for why, count in reasons.most_common(SHOWN)]
    return f"{len(skipped)} of {total} records are left out: {'; '.join(told)}"


def _told(bad: Sequence[Skipped]) -> str:
    lines = [f"{one.place}: {one.reason}" for one in bad[:SHOWN]]
    if len(bad) > SHOWN:
        lines.append(f"and {len(bad) - SHOWN} more")
    return "\n".join([*lines, "put them right, or say on_bad_record: skip"])
