"""Records out of json, jsonl, csv, tsv, parquet and txt files, a block at a time."""

from mindspeed_llm.data.readers.blocks import (
    FORMATS,
    Block,
    Problem,
    Source,
    blocks,
    find_sources,
    first_rows,
    kind_of,
    read,
    record_unit,
)

__all__ = [
    "FORMATS",
    "Block",
    "Problem",
    "Source",
    "blocks",
    "find_sources",
    "kind_of",
    "first_rows",
    "read",
    "record_unit",
]
