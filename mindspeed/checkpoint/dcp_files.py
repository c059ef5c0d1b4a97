"""The tensors in the .distcp files of a torch.distributed.checkpoint, as views of the files."""

import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path

import torch

from mindspeed.checkpoint.dcp_metadata import DcpChunk, DcpTensor
from mindspeed.checkpoint.file_io import FileRangeReader, MappedFile
from mindspeed.checkpoint.tensor_slice import slice_shape
from mindspeed.config import ConfigError

LARGEST_DESCRIPTION = 1 << 20


class DcpFiles:
    """The .distcp files of a folder, each mapped once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[str, MappedFile] = {}
        self._values: dict[DcpChunk, torch.Tensor] = {}

    def opened(self) -> list[MappedFile]:
        """Return the files that have been opened."""
        return list(self._opened.values())

    def values(self, chunk: DcpChunk) -> torch.Tensor:
        """Return a view of a chunk."""
        if chunk not in self._values:
            self._values[chunk] = self._view(chunk)
        return self._values[chunk]

    def _view(self, chunk: DcpChunk) -> torch.Tensor:
        path = self.folder / chunk.file
        if chunk.file not in self._opened:
            _check_size(path, 0)
            self._opened[chunk.file] = MappedFile(path)
        file = self._opened[chunk.file]
        _check_size(path, chunk.offset + chunk.length)
        try:
            return _saved_tensor(file, chunk)
        except ConfigError:
            raise
        except Exception as error:  # whatever a damaged archive can cause
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{path}: cannot be read safely: {reason}") from None


def check_files(folder: Path, tensors: Iterable[DcpTensor]) -> None:
    """Raise unless every file exists and is as long as .metadata requires."""
    ends: dict[str, int] = {}
    for chunk in (chunk for tensor in tensors for chunk in tensor.chunks):
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
    for name, end in sorted(ends.items()):
        _check_size(folder / name, end)


def _check_size(path: Path, end: int) -> None:
    if not path.is_file():
        raise ConfigError(f"{path}: is missing, but .metadata names it")
    if (size := path.stat().st_size) < end:
        raise ConfigError(f"{path}: is cut off: {size} bytes, less than .metadata says")


def _saved_tensor(file: MappedFile, chunk: DcpChunk) -> torch.Tensor:
    """Return a view of the tensor that torch.save wrote into a range of a file."""
    reader = FileRangeReader(file.read_at, chunk.offset, chunk.length)
    with zipfile.ZipFile(reader) as archive:
        members = archive.infolist()
    records = [member for member in members if "/data/" in member.filename]
    pickles = [member for member in members if member.filename.endswith("data.pkl")]
    if len(records) != 1 or len(pickles) != 1 or pickles[0].file_size > LARGEST_DESCRIPTION:
        raise ConfigError(f"{file.path}: at byte {chunk.offset} is not one saved tensor")
    reader.seek(0)
    # On the meta device torch reads the description, which weights_only keeps harmless, and no
    # values: these stay in the file.
    described = torch.load(reader, map_location="meta", weights_only=True)  # type: ignore[arg-type]
    record = records[0]
    if not isinstance(described, torch.Tensor) or record.compress_type != zipfile.ZIP_STORED:
        raise ConfigError(f"{file.path}: at byte {chunk.offset} is not one saved tensor")
    if tuple(described.shape) != slice_shape(chunk.region):
        raise ConfigError(
            f"{file.path}: at byte {chunk.offset} is a tensor of {tuple(described.shape)}, "
            f".metadata says {slice_shape(chunk.region)}"
        )
    header = chunk.offset + record.header_offset
    name_length, extra_length = struct.unpack("<HH", file.read(header + 26, header + 30))
    start = header + 30 + name_length + extra_length
    if start + record.file_size > chunk.offset + chunk.length:
        raise ConfigError(f"{file.path}: at byte {chunk.offset} is a tensor that is cut off")
    count = record.file_size // described.dtype.itemsize
    flat = file.tensor(start, described.dtype, (count,))
    return flat.as_strided(described.size(), described.stride(), described.storage_offset())
