"""Rows of csv, tsv and parquet files."""

import csv
from collections.abc import Iterator, Sequence

from mindspeed.config import ConfigError
from mindspeed_llm.data.readers.blocks import BLOCK_BYTES, Problem, Row

LONGEST_FIELD = 64 << 20
"""A quote that is never closed would otherwise swallow the rest of the file."""


def read_csv(path: str) -> Iterator[tuple[int, Row]]:
    """Yield the length and the row of every line below the header; the line is its last one."""
    csv.field_size_limit(LONGEST_FIELD)
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
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise ConfigError(f"{path}: its first line names {', '.join(map(repr, doubles))} twice")
    return names


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
                    for record in batch.to_pylist():
                        number += 1
                        yield length, (number, record or Problem("has no columns"))
                if number != end:  # a damaged page ends a row group without an error
                    raise ValueError(f"row group {group} should end at row {end}")
    except (pa.ArrowException, OSError, UnicodeDecodeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}, after row {number}: is not valid parquet: {reason}") from None
