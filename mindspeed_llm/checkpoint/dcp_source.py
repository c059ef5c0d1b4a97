"""Read the weights of a torch_dist (torch.distributed.checkpoint) training checkpoint."""

import io
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.assembly import Part, Whole
from mindspeed_llm.checkpoint.boxes import Box, intersection, moved, sizes, slices, whole
from mindspeed_llm.checkpoint.dcp_metadata import Chunk, DcpTensor, read_metadata
from mindspeed_llm.checkpoint.mapped_file import MappedFile
from mindspeed_llm.checkpoint.mcore_source import seen_shape
from mindspeed_llm.checkpoint.placement import FUSED_LATENT_NORMS, FUSED_NORMS
from mindspeed_llm.checkpoint.source import Source, check_names
from mindspeed_llm.models.families import family_named
from mindspeed_llm.models.rules import Cut
from mindspeed_llm.models.shape import ModelShape
from mindspeed_llm.models.table import Weight

PARTS = ("embedding.", "decoder.", "output_layer.", "mtp.")
"""Beginnings of the names of weights; others belong to the optimizer and the training."""
PREFIXES = ("", "model.", "module.", "model.module.")
ADAPTERS = "_lora"
"""Behind the name of a layer, the name of its LoRA adapters."""
LARGEST_DESCRIPTION = 1 << 20


def open_dcp(folder: Path, shape: ModelShape) -> Source:
    """Map the weights of an iteration, whatever layout it was saved in."""
    tensors = _weights_only(read_metadata(folder))
    if not tensors:
        raise ConfigError(f"{folder}: has no weights: no name begins with {', '.join(PARTS)}")
    shape = seen_shape(shape, "\n".join(tensors))
    files = _Files(folder)
    found, used = {}, set()
    for weight in family_named(shape.family).table.weights(shape):
        name, leading = _place_of(weight, tensors, folder)
        used.add(name)
        _check(folder, name, tensors[name], weight, len(leading))
        found[weight.name] = Whole(list(_parts(tensors[name], leading, files)))
    tied_copies = {"output_layer.weight"} if shape.tied else set()
    check_names(set(tensors) - tied_copies, used - tied_copies, str(folder))
    return Source(shape, found, files.opened())


def read_adapters(folder: Path) -> dict[str, torch.Tensor]:
    """Read the adapters of an iteration, by the names that single layers give them."""
    files, found = _Files(folder), {}
    for name, tensor in _model_tensors(read_metadata(folder)).items():
        if not _is_adapter(name):
            continue
        values = torch.empty(tensor.shape, dtype=files.values(tensor.chunks[0]).dtype)
        for part in _parts(tensor, (), files):
            values[slices(part.place)] = part.values
        start, _, rest = name.partition(".layers.")
        if rest.partition(".")[0].isdigit():
            found[name] = values
        else:  # all layers in one tensor
            found |= {f"{start}.layers.{i}.{rest}": one for i, one in enumerate(values)}
    return found


def _weights_only(tensors: dict[str, DcpTensor]) -> dict[str, DcpTensor]:
    return {n: t for n, t in _model_tensors(tensors).items() if not _is_adapter(n)}


def _is_adapter(name: str) -> bool:
    return f"{ADAPTERS}." in name


def _model_tensors(tensors: dict[str, DcpTensor]) -> dict[str, DcpTensor]:
    """Return what belongs to the model without the prefix that wrappers give the names."""
    for prefix in PREFIXES:
        starts = tuple(prefix + part for part in PARTS)
        found = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(starts)}
        if found:
            return {n: t for n, t in found.items() if not n.endswith("_extra_state")}
    return {}


def _place_of(
    weight: Weight, tensors: dict[str, DcpTensor], folder: Path
) -> tuple[str, tuple[int, ...]]:
    """Return the tensor that holds a weight, and the weight's numbers in its leading dimensions."""
    tried = []
    for name in _spellings(weight.name):
        leading: tuple[int, ...] = ()
        if weight.expert is not None:
            name = name.replace(f".experts.{weight.expert}.", ".experts.experts.")
            leading = (weight.expert,)
        part, dot, rest = name.partition(".layers.")
        number, _, inner = rest.partition(".")
        stacked = f"{part}.layers.{inner}" if dot else name
        tried.append(name)
        if name in tensors:
            return name, leading
        if stacked in tensors:  # all layers in one tensor
            return stacked, (int(number), *leading)
    raise ConfigError(f"{folder}: {weight.name} is missing: looked for {' and '.join(tried)}")


def _spellings(name: str) -> Iterator[str]:
    """Yield the names that different layer specs give a weight."""
    yield name
    for norms in (FUSED_NORMS, FUSED_LATENT_NORMS):
        for plain, fused in norms.items():
            if name.endswith("." + plain):
                yield name.removesuffix(plain) + fused
    if ".transformer_layer." in name:
        yield name.replace(".transformer_layer.", ".mtp_model_layer.")


def _check(folder: Path, name: str, tensor: DcpTensor, weight: Weight, leading: int) -> None:
    shape = tensor.shape[leading:]
    is_padded = weight.cut is Cut.VOCABULARY and shape[:1] >= weight.shape[:1]
    if shape != weight.shape and not (is_padded and shape[1:] == weight.shape[1:]):
        raise ConfigError(
            f"{folder}: {name} has the shape {shape}, the config makes it {weight.shape}"
        )


def _parts(tensor: DcpTensor, leading: tuple[int, ...], files: "_Files") -> Iterator[Part]:
    """Yield the parts of a weight that the chunks of its tensor hold."""
    wanted: Box = (*((n, n + 1) for n in leading), *whole(tensor.shape[len(leading) :]))
    for chunk in tensor.chunks:
        if (shared := intersection(wanted, chunk.box)) is not None:
            values = files.values(chunk)[slices(moved(shared, chunk.box, whole(sizes(chunk.box))))]
            place = shared[len(leading) :]
            yield Part(place, values.reshape(sizes(place)))


class _Files:
    """The .distcp files of a folder, each mapped once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[str, MappedFile] = {}
        self._values: dict[Chunk, torch.Tensor] = {}

    def opened(self) -> list[MappedFile]:
        """Return the files that have been opened."""
        return list(self._opened.values())

    def values(self, chunk: Chunk) -> torch.Tensor:
        """Return a view of a chunk."""
        if chunk not in self._values:
            self._values[chunk] = self._view(chunk)
        return self._values[chunk]

    def _view(self, chunk: Chunk) -> torch.Tensor:
        path = self.folder / chunk.file
        if chunk.file not in self._opened:
            if not path.is_file():
                raise ConfigError(f"{path}: is missing, but .metadata names it")
            self._opened[chunk.file] = MappedFile(path)
        file = self._opened[chunk.file]
        if chunk.offset + chunk.length > file.size:
            raise ConfigError(f"{path}: is cut off: {file.size} bytes, less than .metadata says")
        try:
            return _saved_tensor(file, chunk)
        except ConfigError:
            raise
        except Exception as error:  # whatever a damaged archive can cause
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{path}: cannot be read safely: {reason}") from None


def _saved_tensor(file: MappedFile, chunk: Chunk) -> torch.Tensor:
    """Return a view of the tensor that torch.save wrote into a range of a file."""
    reader = _Range(file, chunk.offset, chunk.length)
    with zipfile.ZipFile(reader) as archive:
        members = archive.infolist()
    records = [member for member in members if "/data/" in member.filename]
    pickles = [member for member in members if member.filename.endswith("data.pkl")]
    if len(records) != 1 or len(pickles) != 1 or pickles[0].file_size > LARGEST_DESCRIPTION:
        raise ConfigError(f"{file.path}: at byte {chunk.offset} is not one saved tensor")
    reader.seek(0)
    # On the meta device torch reads the description, which weights_only keeps harmless, and no
    # numbers: these stay in the file.
    described = torch.load(reader, map_location="meta", weights_only=True)  # type: ignore[arg-type]
    record = records[0]
    if not isinstance(described, torch.Tensor) or record.compress_type != zipfile.ZIP_STORED:
        raise ConfigError(f"{file.path}: at byte {chunk.offset} is not one saved tensor")
    if tuple(described.shape) != sizes(chunk.box):
        raise ConfigError(
            f"{file.path}: at byte {chunk.offset} is a tensor of {tuple(described.shape)}, "
            f".metadata says {sizes(chunk.box)}"
        )
    header = chunk.offset + record.header_offset
    name_length, extra_length = struct.unpack("<HH", file.read(header + 26, header + 30))
    start = header + 30 + name_length + extra_length
    if start + record.file_size > chunk.offset + chunk.length:
        raise ConfigError(f"{file.path}: at byte {chunk.offset} is a tensor that is cut off")
    count = record.file_size // described.dtype.itemsize
    flat = file.tensor(start, described.dtype, (count,))
    return flat.as_strided(described.size(), described.stride(), described.storage_offset())


class _Range(io.RawIOBase):
    """A range of a mapped file, read like a file of its own."""

    def __init__(self, file: MappedFile, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that it can be read anywhere."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read the next bytes."""
        stop = min(self._length, self._position + len(buffer))
        data = self._file.read(
            self._start + self._position, self._start + max(stop, self._position)
        )
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
