"""LoRA adapters: read from training checkpoints, read and written as peft files, merged."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed.checkpoint import digests
from mindspeed.checkpoint.assembly import FullTensor, Shard
from mindspeed.checkpoint.commit import staged_directory
from mindspeed.checkpoint.detection import ADAPTER_CONFIG, CheckpointDir, read_adapter_config
from mindspeed.checkpoint.tensor_slice import full_slice, to_index
from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.source import WeightSource
from mindspeed_llm.checkpoint.torch_dist import (
    ADAPTERS,
    adapter_ranges,
    open_torch_dist,
    read_adapters,
)
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.registry import family_named

WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."

Factors = tuple[torch.Tensor, torch.Tensor]
"""A (rank, in) and B (out, rank): a weight W is used as W + scale * B A."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model by HF projection, such as model.layers.0.self_attn.q_proj."""

    config: Mapping[str, Any]
    factors: Mapping[str, Factors]

    @property
    def scale(self) -> float:
        """Return the factor of the low-rank update."""
        return float(self.config["lora_alpha"]) / int(self.config["r"])


def saved_adapters(folder: Path, model_config: ModelConfig) -> Adapters | None:
    """Read the adapters of an iteration, if it has any."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    config, tensors = read_adapter_config(folder), read_adapters(folder)
    factors = {}
    for weight in family_named(model_config.family).table.weights(model_config):
        layer = weight.name.removesuffix(".weight") + ADAPTERS
        if weight.expert is not None:  # all experts in one tensor
            layer = layer.replace(f".experts.{weight.expert}.", ".experts.experts.")
        for hf in {m.hf_name.removesuffix(".weight") for m in weight.slice_maps}:
            short = hf.rpartition(".")[2]
            names = [f"{layer}.{short}.lora_{letter}.weight" for letter in "AB"]
            if all(name in tensors for name in names):
                a, b = (tensors[name] for name in names)
                factors[hf] = (
                    (a, b) if weight.expert is None else (a[weight.expert], b[weight.expert])
                )
    return Adapters(config, factors)


def merge_adapters(source: WeightSource, folder: Path) -> WeightSource:
    """Return the weights of an iteration with its adapters, if it has any, merged into them."""
    adapters = saved_adapters(folder, source.config)
    if adapters is None:
        return source
    tensors = dict(source.tensors)
    for weight in family_named(source.config.family).table.weights(source.config):
        total: torch.Tensor | None = None
        for m in weight.slice_maps:
            factors = adapters.factors.get(m.hf_name.removesuffix(".weight"))
            if factors is None:
                continue
            if total is None:
                total = _assembled(tensors[weight.name], weight.shape)
            rows, columns = to_index(m.hf_slice)
            a, b = (factor.float() for factor in factors)
            total[to_index(m.mcore_slice)] += adapters.scale * (b[rows] @ a[:, columns])
        if total is not None:
            values = total.to(tensors[weight.name].dtype)
            tensors[weight.name] = FullTensor([Shard(full_slice(weight.shape), values)])
    return dataclasses.replace(source, tensors=tensors)


def export(
    found: CheckpointDir,
    model_config: ModelConfig,
    target: Path,
    *,
    verify: bool = True,
    overwrite: bool = False,
) -> int:
    """Write the adapters of a training checkpoint as peft does; return their number."""
    from safetensors.torch import save_file

    check_present(found)
    if model_config.num_labels:
        raise ConfigError(
            f"{found.folder}: has a value head, which is no adapter: export the whole model with "
            "--merge"
        )
    has_more = bool(read_adapter_config(found.folder).get("modules_to_save"))
    ranges = adapter_ranges(found.folder) if verify and not has_more else None
    digests.verify(found.folder, enabled=verify, ranges=ranges)
    adapters = saved_adapters(found.folder, model_config)
    assert adapters is not None
    tensors = {}
    for name, factors in sorted(adapters.factors.items()):
        for letter, factor in zip("AB", factors):
            tensors[f"{PEFT_PREFIX}{name}.lora_{letter}.weight"] = factor.contiguous()
    tensors |= _whole_modules(found.folder, model_config, adapters.config)
    with staged_directory(target, overwrite) as staging:
        save_file(tensors, staging / WEIGHTS, {"format": "pt"})
        text = json.dumps(adapters.config, indent=2, sort_keys=True)
        (staging / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
        digests.write_digests(staging, {}, {"kind": "adapters"})
    return len(adapters.factors)


def _whole_modules(
    folder: Path, model_config: ModelConfig, config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the weights that were trained whole beside the adapters, as peft names them."""
    modules = tuple(config.get("modules_to_save") or ())
    if not modules:
        return {}
    source = open_torch_dist(folder, model_config)
    found = {}
    for weight in family_named(model_config.family).table.weights(source.config):
        name = weight.slice_maps[0].hf_name
        if weight.expert is None and name.split(".")[-2] in modules:
            stored = source.tensors[weight.name]
            values = _assembled(stored, weight.shape).to(stored.dtype)
            found[PEFT_PREFIX + name] = values
    return found


def check_present(found: CheckpointDir) -> None:
    """Raise unless a directory is a training checkpoint with adapters."""
    if found.kind != "torch_dist" or not (found.folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"{found.folder}: holds no adapters: it was not trained with --lora-r")


def peft_names(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of the tensors that peft (or `export`) wrote, without its prefix."""
    from safetensors import safe_open

    path = Path(folder) / WEIGHTS
    with _explained(path), safe_open(path, "pt") as file:
        return [name.removeprefix(PEFT_PREFIX) for name in file.keys()]


def read_peft(folder: str | os.PathLike[str]) -> dict[str, Factors]:
    """Read adapters that peft (or `export`) wrote, by HF projection."""
    from safetensors.torch import load_file

    path = Path(folder) / WEIGHTS
    with _explained(path):
        tensors = load_file(path)
    plain = {name.removeprefix(PEFT_PREFIX): values for name, values in tensors.items()}
    ending = ".lora_A.weight"
    layers = [name.removesuffix(ending) for name in plain if name.endswith(ending)]
    return {
        layer: (plain[layer + ending], plain[f"{layer}.lora_B.weight"])
        for layer in layers
        if f"{layer}.lora_B.weight" in plain
    }


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise what a file of peft can cause as one line."""
    try:
        yield
    except Exception as error:  # whatever a damaged file can cause
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path}: cannot be read ({reason}): give a folder of peft") from None


def _assembled(weight: FullTensor, shape: tuple[int, ...]) -> torch.Tensor:
    total = torch.empty(shape)
    for shard in weight.shards:
        total[to_index(shard.region)] = shard.values.float()
    return total
