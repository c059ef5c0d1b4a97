"""Read the .metadata of a torch.distributed.checkpoint without running anything that is in it.

torch unpickles this file freely, so a file from elsewhere could run code. Here every class in it
is a plain record, and a name that is not one of the expected is refused.
"""

import collections
import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.boxes import Box

LARGEST = 1 << 30


class _Record:
    """Keeps what a pickle gives it and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state

    def get(self, name: str) -> Any:
        """Return a field."""
        state = getattr(self, "state", None)
        return state.get(name) if isinstance(state, dict) else None


class _Tensor(_Record):
    """TensorStorageMetadata."""


class _Size(tuple[Any, ...]):
    """torch.Size."""

    def __new__(cls, values: Any = ()) -> "_Size":
        """Take one sequence."""
        return super().__new__(cls, values)


_RECORDS = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.planner",
    "megatron.core.dist_checkpointing.strategies.torch",
)
"""Modules whose classes become records, all of them: none is looked up."""
_KNOWN: dict[tuple[str, str], Any] = {
    (_RECORDS[0], "TensorStorageMetadata"): _Tensor,
    ("torch", "Size"): _Size,
    ("torch", "strided"): _Record,
    ("torch.serialization", "_get_layout"): _Record,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): _Record,
    ("pathlib._local", "PosixPath"): _Record,
}


# The unpickler in Python: the one in C takes 32 GB of memory when ten bytes tell it to.
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the record for a class; nothing is imported or looked up."""
        if (found := _KNOWN.get((module, name))) is not None:
            return found
        if module in _RECORDS and name.isidentifier():
            return _Record
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise ConfigError(f"it names {module}.{name}, which has no place in such a file")


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
    path = folder / ".metadata"
    try:
        if path.stat().st_size > LARGEST:
            raise ConfigError(f"is larger than {LARGEST >> 30} GiB")
        return _tensors(_Unpickler(io.BytesIO(path.read_bytes())).load())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: refused: {error}") from None
    except Exception as error:  # whatever a damaged pickle can cause
        reason = str(error) or type(error).__name__
        raise ConfigError(f"{path}: is damaged: {reason.splitlines()[0]}") from None


def _tensors(metadata: Any) -> dict[str, DcpTensor]:
    if not isinstance(metadata, _Record):
        raise ConfigError(f"it holds a {type(metadata).__name__}, not Metadata")
    places: dict[tuple[str, tuple[int, ...]], _Record] = {}
    for index, info in metadata.get("storage_data").items():
        places[index.get("fqn"), _numbers(index.get("offset") or ())] = info
    found = {}
    for name, entry in metadata.get("state_dict_metadata").items():
        if isinstance(entry, _Tensor):
            shape = _numbers(entry.get("size"))
            chunks = tuple(_chunk(name, shape, chunk, places) for chunk in entry.get("chunks"))
            found[name] = DcpTensor(shape, chunks)
    return found


def _chunk(name: str, shape: tuple[int, ...], chunk: _Record, places: dict[Any, _Record]) -> Chunk:
    offsets, sizes = _numbers(chunk.get("offsets")), _numbers(chunk.get("sizes"))
    box = tuple((start, start + size) for start, size in zip(offsets, sizes))
    if len(box) != len(shape) or any(stop > size for (_, stop), size in zip(box, shape)):
        raise ConfigError(f"{name} has a part {box} outside its shape {shape}")
    info = places.get((name, offsets))
    if info is None:
        raise ConfigError(f"{name} has a part at {offsets} that is in no file")
    file = info.get("relative_path")
    if not isinstance(file, str) or Path(file).name != file:
        raise ConfigError(f"{name} is in {file!r}, which is not a file of this folder")
    if info.get("transform_descriptors"):
        raise ConfigError(f"{name} is stored compressed, which is not served")
    offset, length = _numbers((info.get("offset"), info.get("length")))
    return Chunk(box, file, offset, length)


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        raise ConfigError(f"{numbers!r} are not sizes")
    return numbers
