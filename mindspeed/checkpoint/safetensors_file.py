"""Read and write .safetensors files: 8 bytes of length, a JSON header, the tensor data."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mindspeed.checkpoint.file_io import MappedFile
from mindspeed.config import ConfigError, did_you_mean, kind_of

LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the format's own library."""
ALIGNMENT = 8

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"
FORMAT = {"format": "pt"}
"""The metadata that transformers requires."""
EXPORTED = FORMAT | {"writer": "mindspeed-llm"}
"""The metadata of exported files, which a later export may replace."""


def read_safetensors(file: MappedFile) -> dict[str, torch.Tensor]:
    """Return views of the tensors; every value of the header is checked before it is used."""
    header, start = _header(file)
    header.pop(METADATA, None)
    tensors, spans = {}, []
    for name, entry in header.items():
        dtype, shape, (begin, end) = _entry(file, name, entry)
        spans.append((begin, end, name))
        if end > file.size - start:
            raise ConfigError(
                f"{file.path}: {name} ends at byte {start + end} of {file.size}: the file is cut "
                "off or its header is wrong"
            )
        tensors[name] = file.tensor(start + begin, dtype, shape)
    _must_tile(file, sorted(spans), file.size - start)
    return tensors


def is_export(path: Path) -> bool:
    """Return whether a file was written by an export."""
    return path.suffix == ".safetensors" and _header(MappedFile(path))[0].get(METADATA) == EXPORTED


def header_bytes(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the length and header of a file with these tensors in this order."""
    header: dict[str, Any] = {METADATA: dict(metadata)}
    position = 0
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _header(file: MappedFile) -> tuple[dict[str, Any], int]:
    if file.size < 8:
        raise ConfigError(f"{file.path}: has {file.size} bytes: not a safetensors file")
    (length,) = struct.unpack("<Q", file.read(0, 8))
    if length > min(file.size - 8, LARGEST_HEADER):
        raise ConfigError(
            f"{file.path}: its header would have {length} bytes, the file has {file.size}: it is "
            "cut off or not a safetensors file"
        )
    try:
        header = json.loads(file.read(8, 8 + length), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file.path}: its header is not valid: {error}") from None
    if not isinstance(header, dict):
        raise ConfigError(f"{file.path}: its header is {kind_of(header)}, not an object")
    return header, 8 + length


def _must_tile(file: MappedFile, spans: Sequence[tuple[int, int, str]], size: int) -> None:
    """Raise if bytes belong to two tensors or to none: the offsets or the file are wrong."""
    covered, last = 0, "the header"
    for begin, end, name in spans:
        if begin < covered:
            raise ConfigError(f"{file.path}: {last} and {name} share bytes")
        if begin > covered:
            raise ConfigError(
                f"{file.path}: {begin - covered} bytes between {last} and {name} belong to no "
                "tensor: the file is damaged"
            )
        covered, last = end, name
    if covered != size:
        raise ConfigError(
            f"{file.path}: {size - covered} bytes behind {last} belong to no tensor: the file is "
            "damaged"
        )


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _entry(
    file: MappedFile, name: str, entry: Any
) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    """Check one tensor's entry."""
    where = f"{file.path}: {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ConfigError(f"{where} lacks dtype, shape or data_offsets in the header")
    kind, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ConfigError(f"{where} has the type {kind!r}; {did_you_mean(str(kind), DTYPES)}")
    if not (_are_sizes(shape) and len(shape) <= 8):
        raise ConfigError(f"{where} has the shape {shape!r}")
    if not (_are_sizes(span) and len(span) == 2):
        raise ConfigError(f"{where} has the data_offsets {span!r}")
    expected = math.prod(shape) * DTYPES[kind].itemsize
    if span[1] - span[0] != expected:
        raise ConfigError(
            f"{where} takes {span[1] - span[0]} bytes, but {kind} of {shape} takes {expected}"
        )
    return DTYPES[kind], tuple(shape), (span[0], span[1])


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )
