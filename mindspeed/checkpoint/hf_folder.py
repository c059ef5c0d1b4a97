"""The files of a Hugging Face model folder: weights, index, config and tokenizer."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from mindspeed.checkpoint import digests
from mindspeed.checkpoint.detection import ADAPTER_CONFIG, INDEXES, SINGLES
from mindspeed.checkpoint.output import Blocks, TypedTensor, tensor_nbytes
from mindspeed.checkpoint.safetensors_file import EXPORTED, FORMAT, header_bytes
from mindspeed.config import ConfigError

LARGEST_INDEX = 256 << 20
SHARD_SIZE = 5 * 10**9
"""Bytes of a file, as in transformers."""
COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
NOT_COPIED = ("*.index.json", ADAPTER_CONFIG, digests.NAME)
LARGEST_COPIED = 1 << 30


def weight_files(folder: Path) -> list[Path]:
    """Return the files with weights; raise where one that the index names is missing."""
    for name in INDEXES:
        if (folder / name).is_file():
            return _indexed(folder / name)
    for name in SINGLES:
        if (folder / name).is_file():
            return [folder / name]
    return sorted(folder.glob("*.safetensors"))


def _indexed(index: Path) -> list[Path]:
    try:
        if index.stat().st_size > LARGEST_INDEX:
            raise ConfigError(f"{index}: is larger than {LARGEST_INDEX >> 20} MiB")
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{index}: has no valid weight_map: download it again") from None
    except OSError as error:
        raise ConfigError(f"{index}: cannot be read ({error.strerror})") from None
    if wrong := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise ConfigError(f"{index}: refused: {wrong[0]!r} is not the name of a file beside it")
    paths = [index.parent / name for name in sorted(names)]
    if missing := [path.name for path in paths if not path.is_file()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(
            f"{index.parent}: {', '.join(missing[:3])}{more} missing ({len(missing)} of the "
            f"{len(paths)} files that {index.name} names): finish the download"
        )
    return paths


@dataclass(frozen=True)
class SafetensorsOutput:
    """A .safetensors file to write."""

    path: Path
    tensors: Sequence[TypedTensor]
    is_export: bool = False
    """Mark the file as an export, so that the next export may replace it."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of its tensors."""
        return sum(tensor_nbytes(*tensor) for tensor in self.tensors)

    def write(self, file: BinaryIO, stream: Blocks) -> None:
        """Write the whole file."""
        described = [(stored.name, dtype, stored.shape) for stored, dtype in self.tensors]
        file.write(header_bytes(described, EXPORTED if self.is_export else FORMAT))
        for stored, dtype in self.tensors:
            for block in stream(stored, dtype):
                file.write(block)


def shard_outputs(
    folder: Path, tensors: Sequence[TypedTensor], shard_size: int = SHARD_SIZE
) -> list[SafetensorsOutput]:
    """Distribute tensors to files; none is larger than `shard_size` unless one tensor is."""
    shards: list[list[TypedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        nbytes = tensor_nbytes(*tensor)
        if shards[-1] and size + nbytes > shard_size:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += nbytes
    if len(shards) == 1:
        return [SafetensorsOutput(folder / "model.safetensors", shards[0], is_export=True)]
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    named = zip(names, shards)
    return [SafetensorsOutput(folder / name, part, is_export=True) for name, part in named]


def write_index(folder: Path, outputs: Sequence[SafetensorsOutput]) -> None:
    """Write the weight map, where there are several files."""
    if len(outputs) == 1:
        return
    index = {
        "metadata": {"total_size": sum(output.nbytes for output in outputs)},
        "weight_map": {s.name: output.path.name for output in outputs for s, _ in output.tensors},
    }
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_small_files(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Copy the config and the tokenizer, with `dtype` as the dtype in the config."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in COPIED:
        for path in sorted(source.glob(pattern)):
            is_kept = not any(path.match(other) for other in NOT_COPIED)
            if is_kept and path.is_file() and path.stat().st_size <= LARGEST_COPIED:
                shutil.copyfile(path, target / path.name)
    if dtype is not None:
        _set_dtype(target / "config.json", str(dtype).removeprefix("torch."))


def _set_dtype(path: Path, name: str) -> None:
    """Set the dtype of the weights in a config.json that has another."""
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "dtype" if "dtype" in config else "torch_dtype"
    if config.get(key) != name:
        text = json.dumps(config | {key: name}, indent=2, sort_keys=True)
        path.write_text(text + "\n", encoding="utf-8")
