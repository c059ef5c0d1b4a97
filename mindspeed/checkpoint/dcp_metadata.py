"""Read the .metadata of a torch.distributed.checkpoint without running anything that is in it.

torch unpickles this file, so a file from elsewhere could run code. Here the pickle is executed by
an interpreter that knows no callable: classes of an explicit list, each with its explicit fields,
become inert records. From the verified records a `Metadata` is rebuilt, and torch gets that.
"""

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mindspeed.checkpoint.digests import Ranges
from mindspeed.checkpoint.tensor_slice import TensorSlice
from mindspeed.config import ConfigError

METADATA = ".metadata"
LARGEST = 1 << 30
FLAT_SHAPE = "nd_reformulated_orig_global_shape"
"""The key under which megatron-core 0.12 keeps the original shape of a flattened tensor."""

_DCP = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_WHOLE = frozenset(
    "state_dict_metadata planner_data storage_data storage_meta version mcore_data "
    "all_local_plans".split()
)
_PLAN = frozenset("items storage_data planner_data usable mcore_data".split())
_FIELDS: dict[tuple[str, str], frozenset[str]] = {
    (f"{_DCP}.metadata", "Metadata"): _WHOLE,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): frozenset(("properties", "size", "chunks")),
    (f"{_DCP}.metadata", "BytesStorageMetadata"): frozenset(),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): frozenset(("offsets", "sizes")),
    (f"{_DCP}.metadata", "MetadataIndex"): frozenset(("fqn", "offset", "index")),
    (f"{_DCP}.metadata", "StorageMeta"): frozenset(
        ("checkpoint_id", "save_id", "load_id", "modules")
    ),
    (f"{_DCP}.filesystem", "_StorageInfo"): frozenset(
        ("relative_path", "offset", "length", "transform_descriptors")
    ),
    # Plans, which Megatron keeps for a second save by the same process: skipped, never used.
    (f"{_DCP}.planner", "SavePlan"): _PLAN,
    (_MEGATRON, "MCoreSavePlan"): _PLAN,
    (_MEGATRON, "MCoreMetadata"): _WHOLE,
    (f"{_DCP}.planner", "WriteItem"): frozenset(("index", "type", "bytes_io_data", "tensor_data")),
    (f"{_DCP}.planner", "BytesIOWriteData"): frozenset(("nbytes",)),
    (f"{_DCP}.planner", "TensorWriteData"): frozenset(("chunk", "properties", "size")),
    (f"{_DCP}.filesystem", "_StoragePrefix"): frozenset(("prefix",)),
}
"""Classes whose state is a dictionary of these fields."""
_PROPERTIES = {(f"{_DCP}.metadata", "TensorProperties"), (_OLD, "TensorProperties")}
"""Classes whose state is (dtype, layout, requires_grad, memory format, pin_memory)."""
_MEMORY_FORMATS = {(f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"), (_OLD, "MEM_FORMAT_ENCODING")}
_DICTIONARY = ("collections", "OrderedDict")
_CALLED = _MEMORY_FORMATS | {
    _DICTIONARY,
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_DCP}.planner", "WriteItemType"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""Classes and functions that are called with plain values."""
_DTYPES = {
    ("torch", name): getattr(torch, name)
    for name in (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz "
        "float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 complex64 complex128 int64 int32 int16 "
        "int8 uint64 uint32 uint16 uint8 bool"
    ).split()
    if hasattr(torch, name)
}


class _Name:
    """A global that the pickle names; it is never resolved."""

    def __init__(self, module: str, name: str) -> None:
        self.key = (module, name)

    def __str__(self) -> str:
        return ".".join(self.key)


class _Record:
    """An inert record of the state that the pickle gives an object of a class."""

    def __init__(self, kind: _Name, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: Any = None

    def get(self, field: str) -> Any:
        """Return a field of the state."""
        return self.state.get(field) if isinstance(self.state, dict) else None

    def __repr__(self) -> str:
        return f"<{self.kind}>"


_PLAIN_OPCODES = (
    "PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 "
    "BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
    "APPEND APPENDS EMPTY_DICT SETITEM SETITEMS MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET "
    "GLOBAL STACK_GLOBAL"
).split()
"""Opcodes that make plain values; those that call, and the registry of extensions, are not."""


# The unpickler in Python: the one in C allocates 32 GB of memory when ten bytes say so.
class _Interpreter(pickle._Unpickler):
    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]
        for name in _PLAIN_OPCODES
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a name of the list; nothing is imported or resolved."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise ConfigError("it names a class by something that is not a string")
        key = (module, name)
        if key in _FIELDS or key in _CALLED or key in _PROPERTIES or key in _DTYPES:
            return _Name(module, name)
        raise ConfigError(f"it names {module}.{name}, which does not belong in such a file")

    def _make(self) -> None:
        arguments, kind = self.stack.pop(), self.stack[-1]
        if not isinstance(kind, _Name) or kind.key in _DTYPES or not isinstance(arguments, tuple):
            raise ConfigError(f"it calls {kind!r}, which is not one of the known classes")
        if arguments and kind.key not in _CALLED:
            raise ConfigError(f"it calls {kind} with arguments, which torch does not")
        is_dictionary = kind.key == _DICTIONARY and not arguments
        self.stack[-1] = {} if is_dictionary else _Record(kind, arguments)

    def _build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, _Record) or record.state is not None:
            raise ConfigError(f"it sets the state of {record!r}, which has none")
        key = record.kind.key
        if key in _FIELDS:
            if not isinstance(state, dict) or not state.keys() <= _FIELDS[key]:
                raise ConfigError(f"{record.kind} has other fields than torch gives it")
        elif key not in _PROPERTIES or not isinstance(state, tuple):
            raise ConfigError(f"it sets the state of {record.kind}, which has none")
        record.state = state

    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _make
    dispatch[pickle.BUILD[0]] = _build


@dataclass(frozen=True)
class DcpChunk:
    """A slice of a tensor, and where its bytes are."""

    region: TensorSlice
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class DcpTensor:
    """A tensor of the checkpoint."""

    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


def read_dcp_tensors(folder: Path) -> dict[str, DcpTensor]:
    """Return the tensors of a checkpoint; entries that are not tensors are left out."""
    return dcp_tensors(read_dcp_metadata(folder), folder)


def dcp_tensors(metadata: Metadata, folder: Path) -> dict[str, DcpTensor]:
    """Return the tensors of verified metadata; every chunk of them has to be in a file."""
    try:
        return {
            name: DcpTensor(
                tuple(entry.size),
                tuple(_dcp_chunk(name, tuple(entry.size), each, metadata) for each in entry.chunks),
            )
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
    except ConfigError as error:
        raise ConfigError(f"{folder / METADATA}: refused: {error}") from None


def byte_ranges(stored: Mapping[str, DcpTensor], wanted: Iterable[DcpTensor]) -> Ranges:
    """Return the byte ranges of the wanted tensors in each file that holds tensors."""
    found: dict[str, list[tuple[int, int]]] = {
        chunk.file: [] for tensor in stored.values() for chunk in tensor.chunks
    }
    for tensor in wanted:
        for chunk in tensor.chunks:
            found[chunk.file].append((chunk.offset, chunk.length))
    return found


def _dcp_chunk(
    name: str, shape: tuple[int, ...], chunk: ChunkStorageMetadata, metadata: Metadata
) -> DcpChunk:
    offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    region = tuple((start, start + size) for start, size in zip(offsets, sizes))
    if len(region) != len(shape) or len(offsets) != len(sizes):
        raise ConfigError(f"{name} has a part {region} outside its shape {shape}")
    if any(stop > size for (_, stop), size in zip(region, shape)):
        raise ConfigError(f"{name} has a part {region} outside its shape {shape}")
    info = metadata.storage_data.get(MetadataIndex(name, offsets))
    if info is None:
        raise ConfigError(f"{name} has a part at {offsets} that is in no file")
    return DcpChunk(region, info.relative_path, info.offset, info.length)


def read_dcp_metadata(folder: Path) -> Metadata:
    """Return a Metadata made from the verified contents of a checkpoint's .metadata."""
    path = folder / METADATA
    try:
        if path.stat().st_size > LARGEST:
            raise ConfigError(f"is larger than {LARGEST >> 30} GiB")
        return _metadata(_Interpreter(io.BytesIO(path.read_bytes())).load())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: refused: {error}") from None
    except Exception as error:  # whatever a damaged pickle can cause
        reason = str(error) or type(error).__name__
        raise ConfigError(f"{path}: is damaged: {reason.splitlines()[0]}") from None


def _metadata(record: Any) -> Metadata:
    _must_be(record, (f"{_DCP}.metadata", "Metadata"), (_MEGATRON, "MCoreMetadata"))
    entries = {
        _text(name): _entry(_text(name), value)
        for name, value in _items(record.get("state_dict_metadata"), "state_dict_metadata")
    }
    storage = dict(
        _storage_entry(index, info)
        for index, info in _items(record.get("storage_data"), "storage_data")
    )
    planner_data = record.get("planner_data")
    if planner_data is not None:
        planner_data = {
            _text(name): _path(path) for name, path in _items(planner_data, "planner_data")
        }
    version = record.get("version")
    metadata = Metadata(entries, planner_data, storage, StorageMeta())
    if version is not None:
        metadata.version = _text(version)
    if (shapes := record.get("mcore_data")) is not None:
        metadata.mcore_data = {  # type: ignore[attr-defined]
            _text(name): _flat_shape(value) for name, value in _items(shapes, "mcore_data")
        }
    return metadata


def _entry(name: str, record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(record, _Record) and record.kind.key[1] == "BytesStorageMetadata":
        return BytesStorageMetadata()
    _must_be(record, (f"{_DCP}.metadata", "TensorStorageMetadata"))
    chunks = [_chunk(chunk) for chunk in _sequence(record.get("chunks"), f"chunks of {name}")]
    return TensorStorageMetadata(
        _properties(record.get("properties")), _size(record.get("size")), chunks
    )


def _chunk(record: Any) -> ChunkStorageMetadata:
    _must_be(record, (f"{_DCP}.metadata", "ChunkStorageMetadata"))
    return ChunkStorageMetadata(_size(record.get("offsets")), _size(record.get("sizes")))


def _storage_entry(index: Any, info: Any) -> tuple[MetadataIndex, _StorageInfo]:
    _must_be(index, (f"{_DCP}.metadata", "MetadataIndex"))
    _must_be(info, (f"{_DCP}.filesystem", "_StorageInfo"))
    name, offset, number = (index.get(field) for field in ("fqn", "offset", "index"))
    key = MetadataIndex(
        _text(name),
        None if offset is None else _size(offset),
        None if number is None else _number(number),
    )
    file = info.get("relative_path")
    if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
        raise ConfigError(f"{name} is in {file!r}, which is not a file of this folder")
    if info.get("transform_descriptors"):
        raise ConfigError(f"{name} is stored compressed, which is not supported")
    return key, _StorageInfo(file, _number(info.get("offset")), _number(info.get("length")))


def _properties(record: Any) -> TensorProperties:
    _must_be(record, *_PROPERTIES)
    state = record.state
    if not isinstance(state, tuple) or len(state) != 5:
        raise ConfigError("TensorProperties have other fields than torch gives them")
    dtype, _, _, memory_format, _ = state
    if not isinstance(dtype, _Name) or dtype.key not in _DTYPES:
        raise ConfigError(f"{dtype!r} is not the type of a tensor")
    _must_be(memory_format, *_MEMORY_FORMATS)
    # The other fields (layout, pinned memory) are deprecated; checkpoints hold strided tensors.
    return TensorProperties(dtype=_DTYPES[dtype.key])


def _size(value: Any) -> torch.Size:
    if isinstance(value, _Record):
        _must_be(value, ("torch", "Size"))
        (value,) = value.arguments or ((),)
    return torch.Size(_number(number) for number in _sequence(value, "a shape"))


def _flat_shape(value: Any) -> dict[str, torch.Size]:
    known = dict(_items(value, "mcore_data"))
    if known.keys() - {FLAT_SHAPE}:
        raise ConfigError("mcore_data has other fields than Megatron gives it")
    return {name: _size(shape) for name, shape in known.items()}


def _path(value: Any) -> tuple[str | int, ...]:
    return tuple(
        part if isinstance(part, str) else _number(part) for part in _sequence(value, "a path")
    )


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ConfigError(f"{value!r} is not a size")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} is not a name")
    return value


def _items(value: Any, what: str) -> Iterable[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise ConfigError(f"{what} is not a dictionary")
    return value.items()


def _sequence(value: Any, what: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{what} is not a list")
    return value


def _must_be(value: Any, *kinds: tuple[str, str]) -> None:
    if not isinstance(value, _Record) or value.kind.key not in kinds:
        found = value.kind if isinstance(value, _Record) else f"a {type(value).__name__}"
        raise ConfigError(f"it holds {found}, not {kinds[0][1]}")
