"""Read the weights of an HF model directory, and plan the files of one to write."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mindspeed.checkpoint.assembly import (
    FullTensor,
    Shard,
    SliceCopy,
    StoredTensor,
    check_names,
    check_shape,
    only_tensors,
)
from mindspeed.checkpoint.detection import INDEXES, SINGLES
from mindspeed.checkpoint.file_io import MappedFile
from mindspeed.checkpoint.hf_folder import (
    SHARD_SIZE,
    SafetensorsOutput,
    shard_outputs,
    weight_files,
)
from mindspeed.checkpoint.output import with_dtypes
from mindspeed.checkpoint.safetensors_file import read_safetensors
from mindspeed.checkpoint.tensor_slice import slice_shape, to_index
from mindspeed.config import ConfigError, one_of
from mindspeed_llm.checkpoint.pt_file import read_pt
from mindspeed_llm.checkpoint.source import WeightSource
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.hf_config import HfConfig
from mindspeed_llm.models.registry import family_named, read_model_config
from mindspeed_llm.models.weight_table import FUSED, Experts


def open_hf(
    folder: Path, named: str | None = None, config: ModelConfig | None = None
) -> WeightSource:
    """Map the weights of a directory; `named` is the family where the config does not name it."""
    tensors, files = _tensors(folder)
    if config is None:
        _refuse_quantized(folder)
        config = read_model_config(folder, tensors, named)
    return WeightSource(config, _full_tensors(folder, config, tensors), files)


def hf_outputs(
    folder: Path,
    source: WeightSource,
    dtype: torch.dtype | None,
    shard_size: int = SHARD_SIZE,
    experts: Experts = "each",
) -> list[SafetensorsOutput]:
    """Plan the files of a model."""
    typed = with_dtypes(hf_tensors(source.config, experts), source.tensors, dtype)
    return shard_outputs(folder, typed, shard_size)


def hf_tensors(config: ModelConfig, experts: Experts = "each") -> list[StoredTensor]:
    """Return the tensors of an HF model, in the order of its layers."""
    table = family_named(config.family).table
    copies: dict[str, list[SliceCopy]] = {}
    is_float32 = {}
    full_weights = {}
    for weight in table.weights(config, experts):
        for m in weight.slice_maps:
            copies.setdefault(m.hf_name, []).append(
                SliceCopy(weight.name, m.mcore_slice, m.hf_slice)
            )
            is_float32[m.hf_name] = weight.is_float32
        full_weights[weight.name] = copies[weight.slice_maps[0].hf_name]
    for name, original in table.hf_copies(config).items():
        copies[name], is_float32[name] = full_weights[original], False
    stored = []
    for name, parts in copies.items():
        tensor = StoredTensor(name, _extent(parts), tuple(parts), None, is_float32[name])
        if (view := table.hf_view(name)) is not None:
            shape, split = view.shapes(tensor.shape)
            tensor = replace(tensor, shape=shape, view=split, order=view.order)
        stored.append(tensor)
    return stored


def _tensors(folder: Path) -> tuple[dict[str, torch.Tensor], list[MappedFile]]:
    tensors: dict[str, torch.Tensor] = {}
    files: list[MappedFile] = []
    paths = weight_files(folder)
    if not paths:
        raise ConfigError(
            f"{folder}: has no weights: looked for {one_of((*INDEXES, *SINGLES, '*.safetensors'))}"
        )
    for path in paths:
        if path.suffix == ".bin":
            found = only_tensors(read_pt(path), str(path))
        else:
            files.append(MappedFile(path))
            found = read_safetensors(files[-1])
        if twice := tensors.keys() & found.keys():
            raise ConfigError(f"{path}: {min(twice)} is also in another file of {folder}")
        tensors |= found
    return tensors, files


def _full_tensors(
    folder: Path, config: ModelConfig, tensors: dict[str, torch.Tensor]
) -> dict[str, FullTensor]:
    """Take each weight from the HF tensors that its rule in the weight table names."""
    table = family_named(config.family).table
    copies = set(table.hf_copies(config)) | ({"lm_head.weight"} if config.tied else set())
    left = {name for name in tensors if not name.endswith(table.ignored) and name not in copies}
    experts = _experts_of(tensors)
    wanted = {t.name: t for t in hf_tensors(config, experts) if t.name not in copies}
    check_names(left, wanted, str(folder))
    seen = {}
    for name, stored in wanted.items():
        check_shape(str(folder), name, tensors[name], stored.shape)
        seen[name] = tensors[name].view(stored.view_shape)
        seen[name] = seen[name].permute(stored.order) if stored.order else seen[name]
    found = {}
    for weight in table.weights(config, experts):
        shards = []
        for m in weight.slice_maps:
            values = seen[m.hf_name][to_index(m.hf_slice)]
            shards.append(Shard(m.mcore_slice, values.reshape(slice_shape(m.mcore_slice))))
        found[weight.name] = FullTensor(shards)
    return found


def _experts_of(names: Iterable[str]) -> Experts:
    """Return how the tensors of a model hold experts."""
    ending = f".experts.{FUSED['linear_fc1']}"
    return "fused" if any(name.endswith(ending) for name in names) else "each"


def _refuse_quantized(folder: Path) -> None:
    config = HfConfig.read(folder)
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else "unknown"
        raise ConfigError(
            f"{config.source}: the weights are quantized ({method}): convert a bf16, fp16 or fp32 "
            "version of the model"
        )


def _extent(copies: Sequence[SliceCopy]) -> tuple[int, ...]:
    return tuple(max(stop for _, stop in pairs) for pairs in zip(*(c.target for c in copies)))
