"""Records that all ranks leave out while training, reported in one line an epoch and a total."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from mindspeed_mm.data.survey import SHOWN, Skipped

logger = logging.getLogger(__name__)


class LeftOut:
    """Counts the records that this rank leaves out, and tells of those of all ranks."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.count = 0
        """Records that this rank left out."""
        self._new: list[Skipped] = []
        self._new_count = 0
        self._total = 0

    def add(self, skipped: Sequence[Skipped]) -> None:
        """Note records of this rank."""
        for one in skipped:
            self.count += 1
            if self.count <= SHOWN:
                logger.warning("left out (%d so far): %s: %s", self.count, one.place, one.reason)
        self._new_count += len(skipped)
        self._new += skipped[: SHOWN - len(self._new)]

    def tell(self, when: str) -> None:
        """Say what all ranks left out since the last time; every rank has to call it."""
        parts = self._everyones()
        self._new, self._new_count = [], 0
        if not (count := sum(number for number, _ in parts)):
            return
        self._total += count
        first = [f"{one.place}: {one.reason}" for _, found in parts for one in found][:SHOWN]
        more = f"; and {count - len(first)} more" if count > len(first) else ""
        logger.warning(
            *("%s: %d record(s) left out by all ranks, %d in all: %s%s", when, count),
            *(self._total, "; ".join(first), more),
        )

    def _everyones(self) -> list[tuple[int, list[Skipped]]]:
        mine = (self._new_count, self._new)
        if self._group is None:
            return [mine]
        parts: list[Any] = [None] * self._group.size()
        dist.all_gather_object(parts, mine, group=self._group)
        return parts
