"""Read torch.save files with nothing but tensors and plain values in them, and write such files.

Written a block at a time; read through memory maps, so neither needs memory for the tensors.
"""

import argparse
import collections
import io
import math
import pickle
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch._utils

from mindspeed.config import ConfigError

ALIGNMENT = 64
"""Of each tensor in the file, as torch.save has it."""
LARGE = 1 << 30
"""Bytes from which a record has a header with 64-bit sizes."""
LARGEST_PICKLE = 1 << 30
HARMLESS = ("megatron.", "numpy.", "mindspeed_llm.", "signal.Signals", "pathlib.")
"""Names that training checkpoints hold beside their tensors. They are not looked up: a stand-in
that does nothing takes their place."""
STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
}
"""How a torch.save file names the types that weights have."""


class _Inert:
    """Stands for an object of which nothing is wanted; whatever is done to it does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> "_Inert":
        """Take any arguments."""
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Take any state."""


def read_pt(path: Path) -> dict[str, Any]:
    """Return the dictionary in a torch.save file; its tensors are mapped, not read.

    torch.load runs with weights_only=True: code in the file is refused, not run.
    """
    _check_archive(path)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals(_stand_ins(path, names)):
            values = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except ConfigError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{path}: cannot be read safely: {reason}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds a {type(values).__name__}, not a dictionary")
    return values


def _stand_ins(path: Path, names: list[str]) -> list[Any]:
    """Return what torch may use for each name in the file; refuse names that could do something."""
    allowed: list[Any] = []
    for name in names:
        if name == "argparse.Namespace":
            allowed.append(argparse.Namespace)
        elif name == "types.SimpleNamespace":
            allowed.append(types.SimpleNamespace)
        elif name.startswith(HARMLESS):
            allowed.append((_Inert, name))
        else:
            raise ConfigError(
                f"{path}: refused: it would run {name} when loaded; a checkpoint needs tensors and "
                "plain values only"
            )
    return allowed


def _check_archive(path: Path) -> None:
    """Refuse what is no archive of uncompressed records within the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise ConfigError(f"{path}: is not a torch.save file, or cut off: {error}") from None
    names = {member.filename.rpartition("/")[2] for member in members}
    if "data.pkl" not in names:
        raise ConfigError(f"{path}: is an archive, but not one of torch.save")
    if "constants.pkl" in names:
        raise ConfigError(f"{path}: refused: it is a TorchScript program, not a checkpoint")
    size = path.stat().st_size
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise ConfigError(f"{path}: refused: {member.filename} is compressed or encrypted")
        if member.header_offset + member.file_size > size:
            raise ConfigError(f"{path}: {member.filename} reaches beyond the end of the file")
        if member.filename.endswith(".pkl") and member.file_size > LARGEST_PICKLE:
            raise ConfigError(f"{path}: refused: {member.filename} has {member.file_size} bytes")


class PtTensor:
    """A tensor whose numbers are written when the file is."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape
        self.numel = math.prod(shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its numbers."""
        return self.numel * self.dtype.itemsize

    def strides(self) -> tuple[int, ...]:
        """Return the strides of a contiguous tensor of this shape."""
        strides, step = [], 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= size
        return tuple(reversed(strides))


def write_pt(
    file: BinaryIO,
    values: Mapping[str, Any],
    blocks: Callable[[PtTensor], Iterator[memoryview]],
) -> None:
    """Write values, whose PtTensors get their bytes from `blocks`, as torch.save would."""
    pickled, tensors = _pickled(values)
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        _write_record(archive, "data.pkl", len(pickled), [memoryview(pickled)])
        _write_record(archive, "byteorder", 6, [memoryview(b"little")])
        for number, tensor in enumerate(tensors):
            _write_record(archive, f"data/{number}", tensor.nbytes, blocks(tensor))
        _write_record(archive, "version", 2, [memoryview(b"3\n")])


def _write_record(archive: zipfile.ZipFile, name: str, size: int, data: Any) -> None:
    info = zipfile.ZipInfo(f"model_optim_rng/{name}", date_time=(1980, 1, 1, 0, 0, 0))
    info.file_size = size
    is_large = size >= LARGE
    assert archive.fp is not None
    begin = archive.fp.tell() + 30 + len(info.filename) + (20 if is_large else 0)
    # An extra field of padding puts the first byte where torch.save would: maps must be aligned.
    padding = -(begin + 4) % ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w", force_zip64=is_large) as record:
        for block in data:
            record.write(block)


def _pickled(values: Mapping[str, Any]) -> tuple[bytes, list[PtTensor]]:
    """Pickle as torch.save does: a tensor is torch's own function on a numbered storage."""
    tensors: list[PtTensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if not isinstance(obj, _Storage):
                return None
            tensors.append(obj.tensor)
            kind = STORAGES[obj.tensor.dtype]
            return ("storage", kind, str(len(tensors) - 1), "cpu", obj.tensor.numel)

        def reducer_override(self, obj: Any) -> Any:
            if not isinstance(obj, PtTensor):
                return NotImplemented
            hooks: Any = collections.OrderedDict()
            parts = (_Storage(obj), 0, obj.shape, obj.strides(), False, hooks)
            return torch._utils._rebuild_tensor_v2, parts

    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump(dict(values))
    return stream.getvalue(), tensors


class _Storage:
    """Stands for the storage of a tensor to be written."""

    def __init__(self, tensor: PtTensor) -> None:
        self.tensor = tensor
