"""Read and write the weights of an mcore checkpoint: one torch.save file for each rank."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from mindspeed.checkpoint.assembly import (
    FullTensor,
    check_names,
    check_shape,
    gather,
    only_tensors,
)
from mindspeed.checkpoint.detection import RANK_FILE
from mindspeed.checkpoint.output import Blocks, TypedTensor, tensor_nbytes, with_dtypes
from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.layout import Layout, LayoutRequest
from mindspeed_llm.checkpoint.pt_file import PtTensor, read_pt, write_pt
from mindspeed_llm.checkpoint.sharding import EMBEDDING, OUTPUT, NameStyle, WeightSharding
from mindspeed_llm.checkpoint.source import WeightSource
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.registry import family_named

FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
VERSION = 3.0
"""Of Megatron's checkpoints: fused query, key and value are in the current order."""
ITERATION = 1


def open_mcore(
    folder: Path, config: ModelConfig, noop_layers: tuple[int, ...] = ()
) -> WeightSource:
    """Map the weights of an iteration; its layout is detected from its files."""
    files = _RankFiles(folder)
    config = with_detected_fields(config, files.all_names())
    layout = files.layout(config, noop_layers)
    weights = list(family_named(config.family).table.weights(config))
    tensors: dict[str, FullTensor] = {}
    for stage, chunks in enumerate(layout.stages):
        for rank in layout.ranks():
            path = folder / layout.folder(rank, stage) / RANK_FILE
            models = files.models(path)
            if len(models) != len(chunks):
                raise ConfigError(f"{path}: has {len(models)} models, not {len(chunks)}")
            joined = {name: tensor for model in models for name, tensor in model.items()}
            rows = _padded_rows(joined, config, layout.tp)
            sharding = WeightSharding(config, weights, NameStyle.detect(joined, config), rows)
            for chunk, model in zip(chunks, models):
                stored = sharding.stored(chunk, rank)
                check_names(model, (tensor.name for tensor in stored), str(path))
                for tensor in stored:
                    check_shape(str(path), tensor.name, model[tensor.name], tensor.shape)
                for name, region, values in gather(stored, model):
                    tensors.setdefault(name, FullTensor()).add(region, values)
    return WeightSource(config, tensors)


def with_detected_fields(config: ModelConfig, names: str) -> ModelConfig:
    """Return the config with the fields that follow from weight names: biases and MTP layers."""
    mtp = {int(number) for number in re.findall(r"(?:^|\n)mtp\.layers\.(\d+)\.", names)}
    detected = {
        "qkv_bias": ".linear_qkv.bias" in names,
        "linear_bias": ".linear_proj.bias" in names,
        "mtp_num_layers": len(mtp),
    }
    return config.model_copy(update=detected)


class _RankFiles:
    """The files of an iteration, each opened once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[Path, dict[str, Any]] = {}
        found = [(FOLDER.fullmatch(path.parent.name), path) for path in self._paths()]
        if wrong := [path for match, path in found if match is None]:
            raise ConfigError(f"{wrong[0].parent}: is not named mp_rank_TT[_PPP][_EEE]")
        self.numbers = [tuple(int(n) for n in m.groups() if n) for m, _ in found if m]
        if len({len(numbers) for numbers in self.numbers}) > 1:
            raise ConfigError(f"{folder}: its mp_rank folders are of different layouts")

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob(f"mp_rank_*/{RANK_FILE}"))

    def values(self, path: Path) -> dict[str, Any]:
        """Return what a file holds."""
        if path not in self._opened:
            if not path.is_file():
                raise ConfigError(f"{path}: is missing; the files of other ranks exist")
            self._opened[path] = read_pt(path)
        return self._opened[path]

    def models(self, path: Path) -> list[dict[str, torch.Tensor]]:
        """Return the weights of each virtual stage in a file."""
        values = self.values(path)
        keys = ["model"] if "model" in values else []
        keys = keys or [f"model{i}" for i in range(len(values)) if f"model{i}" in values]
        models = [values[key] for key in keys]
        if not models or not all(isinstance(model, Mapping) for model in models):
            raise ConfigError(f"{path}: holds no model: its keys are {', '.join(map(str, values))}")
        return [only_tensors(model, str(path)) for model in models]

    def all_names(self) -> str:
        """Return every tensor name of every stage."""
        return "\n".join(n for path in self._paths() for m in self.models(path) for n in m)

    def layout(self, config: ModelConfig, noops: tuple[int, ...]) -> Layout:
        """Return the layout of the files: the recorded one, else the one their names imply."""
        first = self._paths()[0]
        values = self.values(first)
        if isinstance(values.get("layout"), dict):
            return Layout.from_plain(values["layout"], str(first))
        noops = noops or _noops_of(values.get("args"))
        sizes = [max(numbers) + 1 for numbers in zip(*self.numbers)]
        models = self.models(first)
        names = {name for model in models for name in model}
        is_whole = EMBEDDING in names and "decoder.final_layernorm.weight" in names
        if len(sizes) == 2 and is_whole:
            sizes.insert(1, 1)  # the second number is the expert's: each file has every stage
        tp, pp, ep = (*sizes, 1, 1)[:3]
        etp = _expert_tensor_size(models, config, ep)
        if len(models) > 1:
            per_chunk = (config.num_layers + len(noops)) // (pp * len(models))
            request = LayoutRequest(tp, pp, ep, etp, per_chunk, noop_layers=noops)
        else:
            request = LayoutRequest(tp, pp, ep, etp, None, self._layer_list(pp, ep), noops)
            if noops:  # no-ops at the end of a stage leave no trace in the names
                request = LayoutRequest(tp, pp, ep, etp, noop_layers=noops)
        return request.layout(config)

    def _layer_list(self, pp: int, ep: int) -> tuple[int, ...]:
        """Count the layers of each stage."""
        if pp == 1:
            return ()
        counts = []
        for stage in range(pp):
            suffix = f"_{stage:03d}" + ("_000" if ep > 1 else "")
            (model,) = self.models(self.folder / f"mp_rank_00{suffix}" / RANK_FILE)
            counts.append(len({m[1] for name in model if (m := LAYER.match(name))}))
        return tuple(counts)


def _expert_tensor_size(
    models: list[dict[str, torch.Tensor]], config: ModelConfig, ep: int
) -> int | None:
    """Return the expert tensor parallel size, from the size of one rank's shard."""
    if config.moe is None:
        return None
    one = 2 * config.moe.ffn_hidden_size * config.hidden_size
    for model in models:
        for name, tensor in model.items():
            if name.endswith(".experts.weight1"):
                return max(1, config.moe.num_experts // ep * one // max(1, tensor.numel()))
            if ".experts." in name and ".linear_fc1.weight" in name and "shared" not in name:
                return max(1, one // max(1, tensor.numel()))
    return None


def _noops_of(args: Any) -> tuple[int, ...]:
    """Return the no-op layers of saved training arguments, a string or a list."""
    value = getattr(args, "noop_layers", None) or ()
    numbers = value.split(",") if isinstance(value, str) else value
    return tuple(sorted(int(number) for number in numbers))


def _padded_rows(model: Mapping[str, torch.Tensor], config: ModelConfig, tp: int) -> int:
    """Return the rows of the padded embedding."""
    for name in (EMBEDDING,) if config.num_labels else (EMBEDDING, OUTPUT):
        if name in model and model[name].ndim == 2:
            rows = model[name].shape[0] * tp
            if rows < config.vocab_size:
                raise ConfigError(
                    f"{name} has {rows} rows, fewer than the config's vocab_size "
                    f"{config.vocab_size}"
                )
            return rows
    return config.vocab_size


@dataclass(frozen=True)
class PtOutput:
    """A torch.save file with the tensors of one rank."""

    path: Path
    models: dict[str, list[TypedTensor]]
    """The tensors of each model in the file."""
    values: dict[str, Any]
    """Entries beside the models."""
    ranks: dict[str, int] = field(default_factory=dict)
    """The rank of the file in each parallel group."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of its tensors."""
        return sum(tensor_nbytes(*tensor) for model in self.models.values() for tensor in model)

    def write(self, file: BinaryIO, stream: Blocks) -> None:
        """Write the whole file."""
        tensors: dict[PtTensor, TypedTensor] = {}
        models: dict[str, dict[str, PtTensor]] = {}
        for key, model in self.models.items():
            models[key] = {}
            for stored, dtype in model:
                models[key][stored.name] = PtTensor(dtype, stored.shape)
                tensors[models[key][stored.name]] = (stored, dtype)
        write_pt(file, self.values | models, lambda tensor: stream(*tensors[tensor]))


def mcore_outputs(
    folder: Path,
    source: WeightSource,
    layout: Layout,
    style: NameStyle,
    vocab_size: int,
    dtype: torch.dtype | None = None,
) -> list[PtOutput]:
    """Plan the files of every rank."""
    weights = list(family_named(source.config.family).table.weights(source.config))
    sharding = WeightSharding(source.config, weights, style, vocab_size)
    values = {
        "checkpoint_version": VERSION,
        "iteration": ITERATION,
        "layout": layout.as_plain(),
    }
    outputs = []
    for stage, chunks in enumerate(layout.stages):
        for rank in layout.ranks():
            names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
            models = {
                name: with_dtypes(sharding.stored(chunk, rank), source.tensors, dtype)
                for name, chunk in zip(names, chunks)
            }
            path = folder / layout.folder(rank, stage) / RANK_FILE
            ranks = {"tp": rank.tp, "pp": stage, "ep": rank.ep}
            outputs.append(PtOutput(path, models, values, ranks))
    return outputs
