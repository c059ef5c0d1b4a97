"""Write the weights as an HF model directory."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from mindspeed.checkpoint import digests
from mindspeed_llm.checkpoint.assembly import Stored, Tile
from mindspeed_llm.checkpoint.output import SafetensorsOutput, typed
from mindspeed_llm.checkpoint.source import Source
from mindspeed_llm.models.families import family_named
from mindspeed_llm.models.shape import ModelShape

SHARD = 5 * 10**9
"""Bytes of a file, as transformers has it."""
COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
NOT_COPIED = ("*.index.json", "adapter_config.json", digests.NAME)
LARGEST_COPIED = 1 << 30


def hf_tensors(shape: ModelShape) -> list[Stored]:
    """Return the tensors of an HF model, in the order of its layers."""
    table = family_named(shape.family).table
    tiles: dict[str, list[Tile]] = {}
    is_float32 = {}
    whole_weights = {}
    for weight in table.weights(shape):
        for link in weight.links:
            tiles.setdefault(link.hf, []).append(Tile(weight.name, link.place, link.at))
            is_float32[link.hf] = weight.is_float32
        whole_weights[weight.name] = tiles[weight.links[0].hf]
    for name, original in table.hf_copies(shape).items():
        tiles[name], is_float32[name] = whole_weights[original], False
    return [
        Stored(name, _extent(parts), tuple(parts), None, is_float32[name])
        for name, parts in tiles.items()
    ]


def hf_outputs(
    folder: Path, source: Source, dtype: torch.dtype | None, shard: int = SHARD
) -> list[SafetensorsOutput]:
    """Plan the files of a model."""
    return in_shards(folder, typed(hf_tensors(source.shape), source.wholes, dtype), shard)


def in_shards(
    folder: Path, tensors: Sequence[tuple[Stored, torch.dtype]], shard: int = SHARD
) -> list[SafetensorsOutput]:
    """Distribute tensors to files; none is larger than `shard` unless one tensor is."""
    shards: list[list[tuple[Stored, torch.dtype]]] = [[]]
    size = 0
    for tensor in tensors:
        nbytes = SafetensorsOutput(folder, [tensor]).nbytes
        if shards[-1] and size + nbytes > shard:
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
    """Write which tensor is in which file, where there are several."""
    if len(outputs) == 1:
        return
    index = {
        "metadata": {"total_size": sum(output.nbytes for output in outputs)},
        "weight_map": {s.name: output.path.name for output in outputs for s, _ in output.tensors},
    }
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_small_files(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Copy the config and the tokenizer; the config tells the type if it is not the source's."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in COPIED:
        for path in sorted(source.glob(pattern)):
            is_kept = not any(path.match(other) for other in NOT_COPIED)
            if is_kept and path.is_file() and path.stat().st_size <= LARGEST_COPIED:
                shutil.copyfile(path, target / path.name)
    if dtype is not None:
        _tell_dtype(target / "config.json", str(dtype).removeprefix("torch."))


def _tell_dtype(path: Path, name: str) -> None:
    """Put the type of the weights into a config.json that says another."""
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "dtype" if "dtype" in config else "torch_dtype"
    if config.get(key) != name:
        text = json.dumps(config | {key: name}, indent=2, sort_keys=True)
        path.write_text(text + "\n", encoding="utf-8")


def _extent(tiles: Sequence[Tile]) -> tuple[int, ...]:
    return tuple(max(stop for _, stop in pairs) for pairs in zip(*(tile.at for tile in tiles)))
