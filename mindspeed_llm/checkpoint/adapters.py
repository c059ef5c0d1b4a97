"""LoRA adapters: out of training checkpoints, in and out of peft's files, merged into weights."""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed.checkpoint import digests
from mindspeed.config import ConfigError, parse_json
from mindspeed_llm.checkpoint.assembly import Part, Whole
from mindspeed_llm.checkpoint.boxes import slices, whole
from mindspeed_llm.checkpoint.commit import written_aside
from mindspeed_llm.checkpoint.dcp_source import ADAPTERS, adapter_ranges, read_adapters
from mindspeed_llm.checkpoint.detection import Found
from mindspeed_llm.checkpoint.source import Source
from mindspeed_llm.models.families import family_named
from mindspeed_llm.models.shape import ModelShape

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
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
        """The factor of what they add."""
        return float(self.config["lora_alpha"]) / int(self.config["r"])


def saved_adapters(folder: Path, shape: ModelShape) -> Adapters | None:
    """Read the adapters of an iteration, if it has any."""
    if not (folder / CONFIG).is_file():
        return None
    config, tensors = read_config(folder), read_adapters(folder)
    factors = {}
    for weight in family_named(shape.family).table.weights(shape):
        layer = weight.name.removesuffix(".weight") + ADAPTERS
        for hf in {link.hf.removesuffix(".weight") for link in weight.links}:
            short = hf.rpartition(".")[2]
            names = [f"{layer}.{short}.lora_{letter}.weight" for letter in "AB"]
            if all(name in tensors for name in names):
                factors[hf] = (tensors[names[0]], tensors[names[1]])
    return Adapters(config, factors)


def merged(source: Source, folder: Path) -> Source:
    """Return the weights of an iteration with its adapters, if it has any, in them."""
    adapters = saved_adapters(folder, source.shape)
    if adapters is None:
        return source
    wholes = dict(source.wholes)
    for weight in family_named(source.shape.family).table.weights(source.shape):
        total: torch.Tensor | None = None
        for link in weight.links:
            factors = adapters.factors.get(link.hf.removesuffix(".weight"))
            if factors is None:
                continue
            if total is None:
                total = _together(wholes[weight.name], weight.shape)
            rows, columns = slices(link.at)
            a, b = (factor.float() for factor in factors)
            total[slices(link.place)] += adapters.scale * (b[rows] @ a[:, columns])
        if total is not None:
            values = total.to(wholes[weight.name].dtype)
            wholes[weight.name] = Whole([Part(whole(weight.shape), values)])
    return dataclasses.replace(source, wholes=wholes)


def export(found: Found, shape: ModelShape, target: Path, *, verify: bool = True) -> int:
    """Write the adapters of a training checkpoint as peft does; return how many they are."""
    from safetensors.torch import save_file

    check_present(found)
    ranges = adapter_ranges(found.folder) if verify else None
    digests.verify(found.folder, enabled=verify, ranges=ranges)
    adapters = saved_adapters(found.folder, shape)
    assert adapters is not None
    tensors = {}
    for name, factors in sorted(adapters.factors.items()):
        for letter, factor in zip("AB", factors):
            tensors[f"{PEFT_PREFIX}{name}.lora_{letter}.weight"] = factor.contiguous()
    with written_aside(target) as aside:
        save_file(tensors, aside / WEIGHTS, {"format": "pt"})
        text = json.dumps(adapters.config, indent=2, sort_keys=True)
        (aside / CONFIG).write_text(text + "\n", encoding="utf-8")
        digests.write_digests(aside, {}, {"kind": "adapters"})
    return len(adapters.factors)


def check_present(found: Found) -> None:
    """Raise unless a directory is a training checkpoint with adapters."""
    if found.kind != "torch_dist" or not (found.folder / CONFIG).is_file():
        raise ConfigError(f"{found.folder}: holds no adapters: it was not trained with --lora-r")


def read_peft(folder: str | os.PathLike[str]) -> dict[str, Factors]:
    """Read adapters that peft (or `export`) wrote, by HF projection."""
    from safetensors.torch import load_file

    path = Path(folder) / WEIGHTS
    try:
        tensors = load_file(path)
    except Exception as error:  # whatever a damaged file can cause
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path}: cannot be read ({reason}): give a folder of peft") from None
    plain = {name.removeprefix(PEFT_PREFIX): values for name, values in tensors.items()}
    ending = ".lora_A.weight"
    layers = [name.removesuffix(ending) for name in plain if name.endswith(ending)]
    return {
        layer: (plain[layer + ending], plain[f"{layer}.lora_B.weight"])
        for layer in layers
        if f"{layer}.lora_B.weight" in plain
    }


def read_config(folder: Path) -> dict[str, Any]:
    """Read what a checkpoint or a folder of peft tells of its adapters."""
    try:
        config = parse_json((folder / CONFIG).read_text(encoding="utf-8"))
        float(config["lora_alpha"]) / int(config["r"])
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise ConfigError(f"{folder / CONFIG}: cannot be read ({error})") from None
    return dict(config)


def _together(weight: Whole, shape: tuple[int, ...]) -> torch.Tensor:
    total = torch.empty(shape)
    for part in weight.parts:
        total[slices(part.place)] = part.values.float()
    return total
