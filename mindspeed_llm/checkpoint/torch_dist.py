"""Read the weights of a torch_dist (torch.distributed.checkpoint) training checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import torch

from mindspeed.checkpoint.assembly import FullTensor, Shard, check_names
from mindspeed.checkpoint.dcp_files import DcpFiles
from mindspeed.checkpoint.dcp_metadata import DcpTensor, byte_ranges, read_dcp_tensors
from mindspeed.checkpoint.digests import Ranges
from mindspeed.checkpoint.tensor_slice import (
    TensorSlice,
    full_slice,
    intersection,
    slice_shape,
    to_index,
    translate,
)
from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.mcore import with_detected_fields
from mindspeed_llm.checkpoint.sharding import (
    EMBEDDING,
    FUSED_LATENT_NORMS,
    FUSED_NORMS,
    OUTPUT,
)
from mindspeed_llm.checkpoint.source import WeightSource
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.registry import family_named
from mindspeed_llm.models.weight_table import TPSplit, Weight

PARTS = ("embedding.", "decoder.", "output_layer.", "mtp.")
"""Prefixes of weight names; other entries belong to the optimizer and the trainer."""
PREFIXES = ("", "model.", "module.", "model.module.")
ADAPTERS = "_lora"
"""Suffix of a layer's name that makes the name of its LoRA adapters."""


def open_torch_dist(folder: Path, config: ModelConfig, role: str | None = None) -> WeightSource:
    """Map the weights of an iteration, whatever layout it was saved in.

    `role` names one of the further models of a stage, such as a critic, instead of the first.
    """
    stored = read_dcp_tensors(folder)
    tensors = _weights_only(stored, role)
    if not tensors and role is not None:
        raise ConfigError(f"{folder}: has no model {role}: {_describe_roles(stored)}")
    if tensors.get(OUTPUT) is not None and role is not None and tensors[OUTPUT].shape[0] == 1:
        config = config.with_value_head()
    if not tensors:
        raise ConfigError(f"{folder}: has no weights: no name starts with {', '.join(PARTS)}")
    config = with_detected_fields(config, "\n".join(tensors))
    files = DcpFiles(folder)
    found, used = {}, set()
    for weight in family_named(config.family).table.weights(config):
        name, leading = _locate(weight, tensors, folder)
        used.add(name)
        _check(folder, name, tensors[name], weight, len(leading))
        found[weight.name] = FullTensor(list(_shards(tensors[name], leading, files)))
    tied_copies = {"output_layer.weight"} if config.tied else set()
    check_names(set(tensors) - tied_copies, used - tied_copies, str(folder))
    return WeightSource(
        config, found, files.opened(), byte_ranges(stored, _model_tensors(stored, role).values())
    )


def read_adapters(folder: Path) -> dict[str, torch.Tensor]:
    """Read the adapters of an iteration by their per-layer names."""
    files, found = DcpFiles(folder), {}
    for name, tensor in _model_tensors(read_dcp_tensors(folder)).items():
        if not _is_adapter(name):
            continue
        values = torch.empty(tensor.shape, dtype=files.values(tensor.chunks[0]).dtype)
        for shard in _shards(tensor, (), files):
            values[to_index(shard.region)] = shard.values
        start, _, rest = name.partition(".layers.")
        if rest.partition(".")[0].isdigit():
            found[name] = values
        else:  # all layers in one tensor
            found |= {f"{start}.layers.{i}.{rest}": one for i, one in enumerate(values)}
    return found


def adapter_ranges(folder: Path) -> Ranges:
    """Return the byte ranges of the adapters of an iteration."""
    stored = read_dcp_tensors(folder)
    return byte_ranges(stored, (t for n, t in _model_tensors(stored).items() if _is_adapter(n)))


def _weights_only(tensors: dict[str, DcpTensor], role: str | None) -> dict[str, DcpTensor]:
    return {n: t for n, t in _model_tensors(tensors, role).items() if not _is_adapter(n)}


def _describe_roles(tensors: dict[str, DcpTensor]) -> str:
    """Return which further models a checkpoint has."""
    marks = (name.partition(f".{EMBEDDING}") for name in tensors)
    found = sorted({role for role, mark, rest in marks if mark and not rest and "." not in role})
    return f"beside the first it has {', '.join(found) or 'none'}"


def _is_adapter(name: str) -> bool:
    return f"{ADAPTERS}." in name


def _model_tensors(tensors: dict[str, DcpTensor], role: str | None = None) -> dict[str, DcpTensor]:
    """Return the tensors of a model without the prefix that wrappers or roles add to the names."""
    for prefix in PREFIXES if role is None else (f"{role}.",):
        starts = tuple(prefix + part for part in PARTS)
        found = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(starts)}
        if found:
            return {n: t for n, t in found.items() if not n.endswith("_extra_state")}
    return {}


def _locate(
    weight: Weight, tensors: dict[str, DcpTensor], folder: Path
) -> tuple[str, tuple[int, ...]]:
    """Return the tensor that holds a weight, and the weight's index in its leading dimensions."""
    tried = []
    for name in _name_variants(weight.name):
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


def _name_variants(name: str) -> Iterator[str]:
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
    is_padded = weight.split is TPSplit.VOCABULARY and shape[:1] >= weight.shape[:1]
    if shape != weight.shape and not (is_padded and shape[1:] == weight.shape[1:]):
        raise ConfigError(
            f"{folder}: {name} has the shape {shape}, the config makes it {weight.shape}"
        )


def _shards(tensor: DcpTensor, leading: tuple[int, ...], files: DcpFiles) -> Iterator[Shard]:
    """Yield the shards of a weight that the chunks of its tensor hold."""
    wanted: TensorSlice = (
        *((n, n + 1) for n in leading),
        *full_slice(tensor.shape[len(leading) :]),
    )
    for chunk in tensor.chunks:
        if (shared := intersection(wanted, chunk.region)) is not None:
            local = translate(shared, chunk.region, full_slice(slice_shape(chunk.region)))
            values = files.values(chunk)[to_index(local)]
            region = shared[len(leading) :]
            yield Shard(region, values.reshape(slice_shape(region)))
