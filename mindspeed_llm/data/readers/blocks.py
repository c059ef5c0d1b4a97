"""Input files and their blocks of a few megabytes: the unit of reading, encoding and writing.

Lines are split by byte ranges, so the worker that encodes a block reads it too; other formats can
only be read sequentially and are sent as parsed records.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson

from mindspeed.config import ConfigError, kind_of

logger = logging.getLogger(__name__)

FORMATS = ("jsonl", "json", "parquet", "csv", "tsv", "txt")
BLOCK_BYTES = 4 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CONTEXT_CHARS = 15
"""Characters that an error shows before and after the position of a mistake."""


@dataclass(frozen=True)
class Source:
    """One input file."""

    path: str
    format: str
    size: int
    modified: int


def find_sources(given: str | None) -> list[Source]:
    """Return the input files of a file, a folder, or several of them separated by commas."""
    if not given:
        raise ConfigError("--input is missing: give a file, a folder, or several with commas")
    names = [given] if Path(given).exists() else given.split(",")
    found = [source for name in names for source in _find(Path(name.strip()))]
    if all(source.size == 0 for source in found):
        raise ConfigError(f"--input {given} is empty: there is nothing to read")
    return found


def _find(path: Path) -> list[Source]:
    if path.is_dir():
        return _sources_in_folder(path)
    if not path.is_file():
        raise ConfigError(f"--input {path} does not exist")
    if format_of(path) not in FORMATS:
        raise ConfigError(f"--input {path}: its name must end in {_known_endings()}")
    return [_source(path)]


def _sources_in_folder(folder: Path) -> list[Source]:
    """Return the files of known formats in a folder, sorted by name."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    # The summary of an earlier run into the same folder is not data.
    files = [path for path in files if not path.name.endswith(".summary.json")]
    known = [path for path in files if format_of(path) in FORMATS]
    if not known:
        names = ", ".join(path.name for path in files[:5]) or "nothing"
        raise ConfigError(
            f"--input {folder} holds no file that ends in {_known_endings()}: it has {names}"
        )
    if len(known) < len(files):
        logger.info("%s: %d files of other formats are ignored", folder, len(files) - len(known))
    return [_source(path) for path in known]


def _source(path: Path) -> Source:
    try:
        status = path.stat()
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"--input {path} cannot be read: {error.strerror}") from None
    return Source(str(path), format_of(path), status.st_size, status.st_mtime_ns)


def format_of(path: str | Path) -> str:
    """Return the ending of a file's name, which names its format."""
    return Path(path).suffix.lower().removeprefix(".")


def _known_endings() -> str:
    return ", ".join(f".{name}" for name in FORMATS)


class Problem(NamedTuple):
    """The reason why a line is not a record."""

    reason: str


Row = tuple[int, "dict[str, Any] | Problem"]
"""The number of a line (of a row in parquet, of a record in a JSON array), counted from 1, and
what it holds."""


@dataclass(frozen=True)
class Block:
    """A part of one file: a byte range still to be read, or parsed rows."""

    source: Source
    start: int = 0
    end: int = 0
    rows: tuple[Row, ...] | None = None


def blocks(
    sources: Iterable[Source], columns: Sequence[str] = (), size: int = BLOCK_BYTES
) -> Iterator[Block]:
    """Split files into blocks; of tables only `columns` are read (all if none is given)."""
    for source in sources:
        if record_unit(source.path) == "line" and source.format not in ("csv", "tsv"):
            for start in range(0, source.size, size):
                yield Block(source, start, min(start + size, source.size))
        else:
            rows = _rows(source, columns)
            while group := tuple(_take(rows, size)):
                yield Block(source, rows=group)


def read(block: Block) -> tuple[Iterator[Row], int]:
    """Return the rows of a block and its number of lines.

    The line number at which a byte range starts is known only after those before it were read, so
    its rows count from its own first line. Parsed rows have their final numbers, and 0 lines.
    """
    if block.rows is not None:
        return iter(block.rows), 0
    data, rest = _read_range(block)
    if not block.start:
        data, rest = (data + rest).removeprefix(BYTE_ORDER_MARK), b""
    parse = _parse_text if block.source.format == "txt" else _parse_object
    parsed = ((number, parse(line)) for number, line in enumerate(_lines(data, rest), 1))
    rows = ((number, row) for number, row in parsed if row is not None)
    breaks = np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    return rows, int(breaks) + rest.count(b"\n")


def _lines(data: bytes, rest: bytes) -> Iterator[bytes | memoryview]:
    """Split data at its line breaks, without copying; `rest` is the end of the last line."""
    view, start = memoryview(data), 0
    while (end := data.find(b"\n", start)) >= 0:
        yield view[start:end]
        start = end + 1
    yield data[start:] + rest.removesuffix(b"\n")


def first_rows(sources: Sequence[Source], count: int) -> list[tuple[Source, int, Any]]:
    """Return the first rows of every file, with the file."""
    found: list[tuple[Source, int, Any]] = []
    for source in sources:
        first = next(blocks([source], size=1 << 16), None)
        rows = read(first)[0] if first else iter(())
        found.extend((source, *row) for row in islice(rows, count))
    return found


def record_unit(path: str) -> Literal["line", "row", "record"]:
    """Return the unit of record numbers: JSON may be one array, or one object per line."""
    kind = format_of(path)
    if kind != "json":
        return "row" if kind == "parquet" else "line"
    try:
        with open(path, "rb") as file:
            line = file.readline(BLOCK_BYTES).removeprefix(BYTE_ORDER_MARK).strip()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    is_object = line.startswith(b"{") and not isinstance(_parse_object(line), Problem)
    return "line" if is_object else "record"


def _read_range(block: Block) -> tuple[bytes, bytes]:
    """Read the lines that start inside the block's byte range, and the rest of the last one."""
    try:
        with open(block.source.path, "rb") as file:
            if block.start:
                file.seek(block.start - 1)
                file.readline()  # the line that started in the block before
            remaining = block.end - file.tell()
            if remaining <= 0:
                return b"", b""
            data = file.read(remaining)
            return data, b"" if data.endswith(b"\n") else file.readline()
    except OSError as error:
        raise ConfigError(f"{block.source.path} cannot be read: {error.strerror}") from None


def _parse_object(line: bytes | memoryview) -> dict[str, Any] | Problem | None:
    """Parse one line; a blank one is None."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if not bytes(line).strip():
            return None
        return _not_json(line, error)
    if type(value) is not dict:
        return Problem(f"holds {kind_of(value)}, not an object such as {{...}}")
    return value or Problem("holds an empty object")


def _not_json(line: bytes | memoryview, error: orjson.JSONDecodeError) -> Problem:
    try:
        bytes(line).decode()
    except UnicodeDecodeError as wrong:
        return _not_text(wrong)
    return Problem(f"is not valid JSON: {error.msg} (column {error.colno}{error_context(error)})")


def error_context(error: json.JSONDecodeError) -> str:
    """Return the text around a mistake, for an error message."""
    text, position = error.doc, error.pos
    hint = "; an apostrophe has no backslash in JSON" if text[position:].startswith("\\'") else ""
    around = text[max(0, position - CONTEXT_CHARS) : position + CONTEXT_CHARS].strip()
    return f": ...{around}...{hint}" if around else ""


def _parse_text(line: bytes | memoryview) -> dict[str, Any] | Problem | None:
    line = bytes(line)
    try:
        return {"text": line.decode().removesuffix("\r")} if line.strip() else None
    except UnicodeDecodeError as error:
        return _not_text(error)


def _not_text(error: UnicodeDecodeError) -> Problem:
    return Problem(f"is not UTF-8 text: byte {error.start + 1} of the line")


def _rows(source: Source, columns: Sequence[str]) -> Iterator[tuple[int, Row]]:
    """Read the sequential formats: the size of a row, and the row."""
    if source.format == "json":
        from mindspeed_llm.data.readers.formats import read_array as read
    elif source.format == "parquet":
        from mindspeed_llm.data.readers.formats import read_parquet

        return read_parquet(source.path, columns)
    else:
        from mindspeed_llm.data.readers.formats import read_csv as read
    return read(source.path)


def _take(rows: Iterator[tuple[int, Row]], size: int) -> Iterator[Row]:
    taken = 0
    for length, row in rows:
        yield row
        taken += length
        if taken >= size:
            return
