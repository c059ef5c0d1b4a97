"""The summary of a run: every record is written or skipped, and every skip has a reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mindspeed_llm.data.options import PreprocessOptions

FILE_KEYS = {"trained": "learnt"}
"""Fields that have another name in files."""
MAX_LOGGED_RECORDS = 10
"""Malformed records that are logged one by one."""


@dataclass
class Tally:
    """The number of records with one reason, and the first of them."""

    count: int = 0
    first: str = ""


@dataclass
class BlockCounts:
    """Counts of the records of one block; line numbers are relative to the block."""

    records: int = 0
    written: int = 0
    malformed: list[tuple[int, str]] = field(default_factory=list)
    dropped: dict[str, list[int]] = field(default_factory=dict)
    truncated: list[int] = field(default_factory=list)
    tokens: int = 0
    trained: int = 0
    ended: int = 0
    longest: tuple[int, int] = (0, 0)
    """The longest sample, also of those dropped, and its line."""

    def drop(self, reason: str, line: int) -> None:
        """Count a record that is not written."""
        self.dropped.setdefault(reason, []).append(line)

    def measure(self, size: int, line: int) -> None:
        """Update the longest sample."""
        self.longest = max(self.longest, (size, line))


@dataclass
class Summary:
    """Counts of all records."""

    records: int = 0
    written: int = 0
    tokens: int = 0
    trained: int = 0
    """Tokens that are trained; all of them in plain documents."""
    ended: int = 0
    """Samples that end with a stop token."""
    skipped: dict[str, Tally] = field(default_factory=dict)
    truncated: Tally = field(default_factory=Tally)
    longest: int = 0
    longest_at: str = ""
    is_chat: bool = False
    """Whether the records are samples with prompts and completions."""
    rows: int | None = None
    """Packed rows, if samples were packed."""
    seconds: float = 0.0

    def add(self, counts: BlockCounts, path: str, line: int) -> list[str]:
        """Add a block whose first line follows `line`; return its malformed records."""
        from mindspeed_llm.data.readers import (
            record_unit,  # deferred: it imports numpy
        )

        kind = record_unit(path)

        def location(local: int) -> str:
            return f"{path}, {kind} {line + local}"

        for name in ("records", "written", "tokens", "trained", "ended"):
            setattr(self, name, getattr(self, name) + getattr(counts, name))
        malformed_records = [f"{location(local)}: {reason}" for local, reason in counts.malformed]
        malformed = [local for local, _ in counts.malformed]
        for reason, lines in ({"malformed": malformed} | counts.dropped).items():
            if lines:
                _add(self.skipped.setdefault(reason, Tally()), len(lines), location(lines[0]))
        if counts.truncated:
            _add(self.truncated, len(counts.truncated), location(counts.truncated[0]))
        size, local = counts.longest
        if size > self.longest:
            self.longest, self.longest_at = size, location(local)
        return malformed_records

    def describe_too_long(self, options: PreprocessOptions) -> str:
        """Describe how many samples were longer than --seq-length, and whether they were cut."""
        limit = options.seq_length
        dropped = self.skipped.get(too_long_reason(limit), Tally())
        tally = self.truncated if self.truncated.count else dropped
        if not tally.count:
            return f"none of {self.records} (--too-long {options.too_long}, --seq-length {limit})"
        fate = "cut" if self.truncated.count else "dropped"
        return (
            f"{tally.count} of {self.records} longer than {limit} tokens: {fate} "
            f"(--too-long {options.too_long}; first: {tally.first}; longest: {self.longest})"
        )

    @property
    def skipped_records(self) -> int:
        """How many records were not written."""
        return sum(tally.count for tally in self.skipped.values())

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a file."""
        values = asdict(self)
        # Files keep the key of earlier versions, at its position.
        return {FILE_KEYS.get(name, name): value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Summary:
        """Build a summary from the values of `as_dict`."""
        names = {key: name for name, key in FILE_KEYS.items()}
        values = {names.get(key, key): value for key, value in values.items()}
        skipped = {reason: Tally(**tally) for reason, tally in values["skipped"].items()}
        truncated = Tally(**values["truncated"])
        return cls(**{**values, "skipped": skipped, "truncated": truncated})


def too_long_reason(limit: int | None) -> str:
    """Return the reason for which samples of more than `limit` tokens are dropped."""
    return f"longer than {limit} tokens"


def record_location(path: str, number: int) -> str:
    """Locate a record by its file and line, its row in parquet or its number in a JSON array."""
    from mindspeed_llm.data.readers import record_unit

    return f"{path}, {record_unit(path)} {number}"


def _add(tally: Tally, count: int, first: str) -> None:
    tally.count += count
    tally.first = tally.first or first
