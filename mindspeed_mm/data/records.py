"""The records of some files, held as compact JSON: a million of them cost no Python objects."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from mindspeed.config import ConfigError
from mindspeed_llm.data.conversation import MalformedRecord
from mindspeed_llm.data.readers import Problem, Source, blocks, find_sources, read
from mindspeed_llm.data.summary import where


class Records:
    """Records by number, each with the name of its place."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ends = array("q", [0])
        self._lines = array("q")
        self._files = array("l")
        self._paths: list[str] = []

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = orjson.loads(self._bytes[self._ends[index] : self._ends[index + 1]])
        if isinstance(found, str):  # why the line is no record
            raise MalformedRecord(found)
        return dict(found)

    def place(self, index: int) -> str:
        """Name a record by its file and line, or its number in a JSON array."""
        return where(self._paths[self._files[index]], self._lines[index])

    def folder(self, index: int) -> Path:
        """Return the folder of the file that holds a record."""
        return Path(self._paths[self._files[index]]).parent

    def add(self, source: Source, limit: int | None = None) -> None:
        """Read a file, or its first `limit` records."""
        self._paths.append(source.path)
        line, count = 0, 0
        for block in blocks([source]):
            rows, size = read(block)
            for number, record in rows:
                if count == limit:
                    return
                self._append(record, line + number)
                count += 1
            line += size

    def _append(self, record: dict[str, Any] | Problem, line: int) -> None:
        value = record.reason if isinstance(record, Problem) else record
        self._bytes += orjson.dumps(value, default=_as_address)
        self._ends.append(len(self._bytes))
        self._lines.append(line)
        self._files.append(len(self._paths) - 1)


def _as_address(value: Any) -> str:
    """Write the bytes of an image, as parquet files have them, as a data: address."""
    if isinstance(value, bytes):
        return "data:;base64," + base64.b64encode(value).decode()
    raise TypeError


def read_records(paths: Sequence[str], folder: str | None, limit: int | None) -> Records:
    """Read the files that `dataset` names: paths from here, or from the folder of the data."""
    records = Records()
    for name in filter(None, map(str.strip, paths)):
        place = Path(name)
        if not place.exists() and folder and (Path(folder) / place).exists():
            place = Path(folder) / place
        try:
            for source in find_sources(str(place)):
                records.add(source, limit)
        except ConfigError as error:
            raise ConfigError(str(error).replace("--input", "dataset", 1)) from None
    if not len(records):
        raise ConfigError(f"dataset {','.join(paths) or '(nothing)'} holds no records: name a file")
    return records
