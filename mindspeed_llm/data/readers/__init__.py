"""Records out of json, jsonl, csv, tsv, parquet and txt files, a block at a time."""

from mindspeed_llm.data.readers.blocks import Block, Problem, blocks, kind_of, peek, read, unit
from mindspeed_llm.data.readers.sources import FORMATS, Source, find_sources

__all__ = [
    "FORMATS",
    "Block",
    "Problem",
    "Source",
    "blocks",
    "find_sources",
    "kind_of",
    "peek",
    "read",
    "unit",
]
