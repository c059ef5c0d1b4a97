"""The tensors of a torch.distributed.checkpoint: where each part of them is."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from mindspeed.checkpoint.dcp_metadata import METADATA, read_dcp_metadata
from mindspeed.checkpoint.digests import Ranges
from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.boxes import Box


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: its box, and where its bytes are."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class DcpTensor:
    """A tensor of the checkpoint."""

    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_metadata(folder: Path) -> dict[str, DcpTensor]:
    """Return the tensors of a checkpoint; entries that are not tensors are left out."""
    return tensors_of(read_dcp_metadata(folder), folder)


def tensors_of(metadata: Metadata, folder: Path) -> dict[str, DcpTensor]:
    """Return the tensors of verified metadata; every part of them has to be in a file."""
    try:
        return {
            name: DcpTensor(
                tuple(entry.size),
                tuple(_chunk(name, tuple(entry.size), each, metadata) for each in entry.chunks),
            )
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
    except ConfigError as error:
        raise ConfigError(f"{folder / METADATA}: refused: {error}") from None


def ranges_of(stored: Mapping[str, DcpTensor], wanted: Iterable[DcpTensor]) -> Ranges:
    """Return where the wanted tensors are in each file that holds tensors."""
    found: dict[str, list[tuple[int, int]]] = {
        chunk.file: [] for tensor in stored.values() for chunk in tensor.chunks
    }
    for tensor in wanted:
        for chunk in tensor.chunks:
            found[chunk.file].append((chunk.offset, chunk.length))
    return found


def _chunk(
    name: str, shape: tuple[int, ...], chunk: ChunkStorageMetadata, metadata: Metadata
) -> Chunk:
    offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    box = tuple((start, start + size) for start, size in zip(offsets, sizes))
    if len(box) != len(shape) or len(offsets) != len(sizes):
        raise ConfigError(f"{name} has a part {box} outside its shape {shape}")
    if any(stop > size for (_, stop), size in zip(box, shape)):
        raise ConfigError(f"{name} has a part {box} outside its shape {shape}")
    info = metadata.storage_data.get(MetadataIndex(name, offsets))
    if info is None:
        raise ConfigError(f"{name} has a part at {offsets} that is in no file")
    return Chunk(box, info.relative_path, info.offset, info.length)
