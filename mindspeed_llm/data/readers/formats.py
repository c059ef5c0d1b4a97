"""Formats that are read sequentially: one JSON array, csv, tsv and parquet."""

import csv
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import orjson

from mindspeed.config import ConfigError
from mindspeed_llm.data.readers.blocks import BLOCK_BYTES, Problem, Row, error_context, kind_of

CHUNK = 1 << 20
LOOKAHEAD_CHARS = 64
"""A mistake this close to the end of the text that was read may be only an incomplete value."""
_SPACE = re.compile(r"[ \t\r\n]*")
RENDERED = ("tools", "tool_calls", "function_call")
MAX_FIELD_CHARS = 64 << 20
"""Without a limit a quote that is never closed would consume the rest of the file."""


def read_array(path: str) -> Iterator[tuple[int, Row]]:
    """Yield the length and the row of every object of the file, numbered from 1."""
    with open(path, encoding="utf-8-sig") as file:
        try:
            yield from _Scanner(path, file).rows()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 text: {error.reason}") from None


class _Scanner:
    """Finds the end of each value; only the text from the current value on is kept in memory."""

    def __init__(self, path: str, file: TextIO) -> None:
        self._path, self._file = path, file
        self._text, self._position, self._line, self._ended = "", 0, 1, False
        self._record = 1
        # Only the ends of values matter, and a number may have more digits than int() accepts.
        self._decoder = json.JSONDecoder(parse_int=str, parse_float=str)

    def rows(self) -> Iterator[tuple[int, Row]]:
        is_array = self._next_is("[")
        while self._has_value(is_array):
            end = self._end_of_value()
            text = self._text[self._position : end]
            self._move_to(end)
            yield len(text), (self._record, _parse_record(text))
            self._record += 1
            if is_array and not self._next_is(","):
                self._expect_end("]")
                return

    def _has_value(self, is_array: bool) -> bool:
        self._skip_space()
        if self._at_end():
            if is_array:
                self._fail("the array is not closed")
            return False
        if is_array and self._next_is("]"):
            self._expect_end("")
            return False
        return True

    def _expect_end(self, closing: str) -> None:
        if closing and not self._next_is(closing):
            self._fail("a comma or a closing bracket is missing")
        self._skip_space()
        if not self._at_end():
            self._fail("there is more text after the array")

    def _next_is(self, character: str) -> bool:
        self._skip_space()
        if self._at_end() or self._text[self._position] != character:
            return False
        self._position += 1
        return True

    def _skip_space(self) -> None:
        while True:
            match = _SPACE.match(self._text, self._position)
            self._move_to(match.end() if match else self._position)
            if self._position < len(self._text) or not self._read_more():
                return

    def _at_end(self) -> bool:
        return self._position >= len(self._text)

    def _end_of_value(self) -> int:
        """Return the end of the value that starts here, reading more text until it is complete."""
        while True:
            try:
                _, end = self._decoder.raw_decode(self._text, self._position)
                return end
            except json.JSONDecodeError as error:
                open_string = error.msg.startswith("Unterminated string")
                may_go_on = open_string or error.pos > len(self._text) - LOOKAHEAD_CHARS
                if not (may_go_on and self._read_more()):
                    self._move_to(error.pos)
                    self._fail(f"{error.msg}{error_context(error)}")
            except RecursionError:
                self._fail("it is nested too deeply")

    def _read_more(self) -> bool:
        """Double the text from the current value on, so that a long value stays linear."""
        if self._ended:
            return False
        rest = self._text[self._position :]
        more = self._file.read(max(CHUNK, len(rest)))
        self._ended = not more
        self._text, self._position = rest + more, 0
        return bool(more)

    def _move_to(self, position: int) -> None:
        self._line += self._text.count("\n", self._position, position)
        self._position = position

    def _fail(self, reason: str) -> None:
        raise ConfigError(
            f"{self._path}, record {self._record}, line {self._line}: is not valid JSON: {reason}"
        )


def _parse_record(text: str) -> dict[str, Any] | Problem:
    # Parsed again by the parser of lines, so that both formats accept exactly the same values.
    try:
        value = orjson.loads(text)
    except (orjson.JSONDecodeError, UnicodeEncodeError) as error:
        return Problem(f"is not valid JSON: {getattr(error, 'msg', error)}")
    if type(value) is not dict:
        return Problem(f"holds {kind_of(value)}, not an object such as {{...}}")
    return value or Problem("holds an empty object")


def read_csv(path: str) -> Iterator[tuple[int, Row]]:
    """Yield the length and the row of every line below the header; the line is its last one."""
    csv.field_size_limit(MAX_FIELD_CHARS)
    delimiter = "\t" if path.lower().endswith("tsv") else ","
    line = 1
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            names = _header(path, next(reader, []))
            for fields in reader:
                line = reader.line_num
                if fields:
                    yield sum(map(len, fields)), (line, _as_record(names, fields))
    except csv.Error as error:
        raise ConfigError(f"{path}, after line {line}: is not valid csv: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}, after line {line}: is not UTF-8 text: {error.reason}") from None


def _as_record(names: Sequence[str], fields: Sequence[str]) -> dict[str, str] | Problem:
    if len(fields) == len(names):
        return dict(zip(names, fields))
    return Problem(f"has {len(fields)} fields, the header has {len(names)}")


def _header(path: str, names: list[str]) -> list[str]:
    if not names:
        raise ConfigError(f"{path} is empty: its first line must name the columns")
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ConfigError(f"{path}: its first line names {', '.join(map(repr, duplicates))} twice")
    return names


def _without_filled(value: Any, is_json: bool = False) -> Any:
    """Leave out null fields of what is rendered as JSON.

    All structs of a column have the same fields: a table fills in those of other records.
    """
    if isinstance(value, dict):
        return {
            name: _without_filled(inner, is_json or name in RENDERED)
            for name, inner in value.items()
            if inner is not None or not is_json
        }
    return [_without_filled(each, is_json) for each in value] if isinstance(value, list) else value


def read_parquet(path: str, columns: Sequence[str] = ()) -> Iterator[tuple[int, Row]]:
    """Yield the length (an average) and the row of every row; rows are numbered from 1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            known = [name for name in columns if name in file.schema_arrow.names]
            for group in range(file.num_row_groups):
                facts = file.metadata.row_group(group)
                length = max(1, facts.total_byte_size // max(1, facts.num_rows))
                rows, end = max(1, BLOCK_BYTES // length), number + facts.num_rows
                for batch in file.iter_batches(rows, row_groups=[group], columns=known or None):
                    for record in map(_without_filled, batch.to_pylist()):
                        number += 1
                        yield length, (number, record or Problem("has no columns"))
                if number != end:  # a damaged page ends a row group without an error
                    raise ValueError(f"row group {group} should end at row {end}")
    except (pa.ArrowException, OSError, UnicodeDecodeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}, after row {number}: is not valid parquet: {reason}") from None
