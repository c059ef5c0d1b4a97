"""Open a checkpoint of any kind, load its weights into the Megatron model of this rank, and gather
them from it.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mindspeed.checkpoint.assembly import (
    FullTensor,
    StoredTensor,
    check_names,
    check_shape,
    gather,
    only_tensors,
)
from mindspeed.checkpoint.detection import HF_FOLDER, CheckpointDir, detect
from mindspeed.checkpoint.digests import verify as verify_digests
from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.adapters import merge_adapters
from mindspeed_llm.checkpoint.hf import hf_tensors, open_hf
from mindspeed_llm.checkpoint.layout import Chunk, Rank
from mindspeed_llm.checkpoint.mcore import open_mcore
from mindspeed_llm.checkpoint.sharding import EMBEDDING, OUTPUT, NameStyle, WeightSharding
from mindspeed_llm.checkpoint.source import WeightSource
from mindspeed_llm.checkpoint.torch_dist import open_torch_dist
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.registry import family_named, read_model_config
from mindspeed_llm.models.weight_table import Weight


def open_source(
    found: CheckpointDir,
    configs: Path | None = None,
    *,
    config: ModelConfig | None = None,
    named: str | None = None,
    noop_layers: tuple[int, ...] = (),
    role: str | None = None,
) -> WeightSource:
    """Map the weights of a directory; the config is read from config.json unless given.

    `role` names one of the further models of a training checkpoint.
    """
    if role is not None and found.kind != "torch_dist":
        raise ConfigError(f"{found.root}: is no training checkpoint, so it has one model only")
    if found.kind == "hf":
        return open_hf(found.folder, named, config)
    if config is None:
        config = read_model_config(configs or config_folder(found), named=named)
    if role is not None:  # adapters belong to the first model
        return open_torch_dist(found.folder, config, role)
    if found.kind == "torch_dist":
        return merge_adapters(open_torch_dist(found.folder, config), found.folder)
    return open_mcore(found.folder, config, noop_layers)


def verify_source(
    found: CheckpointDir, source: WeightSource, *, enabled: bool, is_shared: bool = False
) -> None:
    """Verify the digests of what will be read; HF models from elsewhere have none."""
    verify_digests(
        found.folder,
        enabled=enabled,
        ranges=source.ranges,
        is_shared=is_shared,
        is_expected=found.kind != "hf",
    )


def config_folder(
    found: CheckpointDir, given: str | None = None, other: Path | None = None
) -> Path:
    """Return the folder with the HF config of a checkpoint: the given one, its own or another."""
    if given is not None:
        if not (Path(given) / "config.json").is_file():
            raise ConfigError(f"--hf-cfg-dir {given}: has no config.json")
        return Path(given)
    if (own := found.config_folder) is not None:
        return own
    if other is not None and (other / "config.json").is_file():
        return other
    looked = dict.fromkeys((found.folder, found.root / HF_FOLDER, found.root))
    raise ConfigError(
        f"{found.root}: no config.json says what model this is: looked in "
        f"{' and in '.join(map(str, looked))}: give --hf-cfg-dir"
    )


def load_weights(
    model_chunks: Sequence[torch.nn.Module],
    source: str | os.PathLike[str],
    *,
    config: ModelConfig | None = None,
    noop_layers: Sequence[int] = (),
    verify: bool = True,
    is_shared: bool = False,
) -> None:
    """Fill this rank's model from an HF directory or a Megatron checkpoint of any layout.

    `config` is that of the model; without it the config.json beside the weights is read. Values are
    cast to the dtype of the parameters. A missing or unexpected weight is an error. So is a file
    that differs from its digest, unless `verify` is false; with `is_shared` all ranks call this,
    and each verifies a share. A value head is not filled from a language model, which has none.
    """
    found = detect(source)
    is_value = config is not None and config.num_labels > 0
    if is_value and not read_model_config(config_folder(found)).num_labels:
        config = None  # of a language model: what its output layer is, its own config says
    opened = open_source(found, config=config)
    verify_source(found, opened, enabled=verify, is_shared=is_shared)
    for chunk in model_chunks:
        _fill(_unwrapped(chunk), opened, tuple(noop_layers))


def hf_weights(
    model_chunks: Sequence[torch.nn.Module], config: ModelConfig, noop_layers: Sequence[int] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the full weights of a model under their HF names, on the host.

    All ranks call this, and all get them; one weight at a time is gathered.
    """
    models = [_unwrapped(chunk) for chunk in model_chunks]
    states = [only_tensors(model.state_dict(keep_vars=True), "the model") for model in models]
    # On all ranks the same: only the last pipeline stage has these layers.
    if not _on_any_rank(any(map(_has_mtp, states))):
        config = config.model_copy(update={"mtp_num_layers": 0})
    weights = list(family_named(config.family).table.weights(config))
    experts = {weight.name for weight in weights if weight.expert is not None}
    shards: dict[str, list[tuple[Any, torch.Tensor]]] = {}
    for model, tensors in zip(models, states):
        stored = _stored(model, tensors, config, weights, tuple(noop_layers))
        for name, region, values in gather(stored, tensors):
            if _is_first_replica(is_expert=name in experts):
                shards.setdefault(name, []).append((region, values.detach()))
    wanted = hf_tensors(config)
    last_use = {copy.name: i for i, one in enumerate(wanted) for copy in one.copies}
    found: dict[str, FullTensor] = {}
    for number, one in enumerate(wanted):
        for name in dict.fromkeys(copy.name for copy in one.copies):
            if name not in found:
                found[name] = _gather_full(shards.get(name, ()))
        target = torch.empty(one.shape, dtype=one.dtype(found, None))
        one.fill(target, found)
        found = {name: full for name, full in found.items() if last_use[name] > number}
        yield one.name, target


def _on_any_rank(value: bool) -> bool:
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return any(values)


def _is_first_replica(*, is_expert: bool) -> bool:
    """Return whether no data-parallel rank before this one has the same part of a weight."""
    from megatron.core import parallel_state

    if is_expert:
        return bool(parallel_state.get_expert_data_parallel_rank() == 0)
    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)


def _gather_full(shards: Sequence[tuple[Any, torch.Tensor]]) -> FullTensor:
    """Gather the shards of a weight from all ranks; copies of tensor-parallel ranks are dropped."""
    # Copies: of a view, the values around it would be sent as well.
    held = [(region, torch.empty(v.shape, dtype=v.dtype).copy_(v)) for region, v in shards]
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, held)
    full = FullTensor()
    for region, values in (shard for rank in ranks for shard in rank):
        full.add(region, values)
    return full


def _fill(model: torch.nn.Module, source: WeightSource, noops: tuple[int, ...]) -> None:
    tensors = only_tensors(model.state_dict(keep_vars=True), "the model")
    config = _without_missing_mtp(source.config, tensors)
    weights = list(family_named(config.family).table.weights(config))
    if _has_value_head(model) and not config.num_labels:
        tensors.pop(OUTPUT)
        config = config.model_copy(update={"tied": False})
        weights = [weight for weight in weights if weight.name != OUTPUT]
    with torch.no_grad():
        for tensor in _stored(model, tensors, config, weights, noops):
            check_shape("the model", tensor.name, tensors[tensor.name], tensor.shape)
            tensor.fill(tensors[tensor.name].data, source.tensors)
    source.release_pages()


def _without_missing_mtp(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> ModelConfig:
    """Return the config without the layers of multi-token prediction that a model does not have."""
    return config if _has_mtp(tensors) else config.model_copy(update={"mtp_num_layers": 0})


def _has_mtp(tensors: Mapping[str, torch.Tensor]) -> bool:
    return any(name.startswith("mtp.") for name in tensors)


def _stored(
    model: Any,
    tensors: Mapping[str, torch.Tensor],
    config: ModelConfig,
    weights: Sequence[Weight],
    noops: tuple[int, ...],
) -> list[StoredTensor]:
    """Return what the tensors of a model are of the full weights; raise if others are there."""
    rank = _current_rank()
    style, rows = NameStyle.detect(tensors, config), _padded_rows(tensors, config, rank)
    stored = WeightSharding(config, weights, style, rows).stored(_chunk_of(model, noops), rank)
    check_names(tensors, (tensor.name for tensor in stored), "the model")
    return stored


def _has_value_head(model: Any) -> bool:
    from mindspeed_llm.models.value_head import ValueHead

    return isinstance(getattr(model, "output_layer", None), ValueHead)


def _chunk_of(model: Any, noops: tuple[int, ...]) -> Chunk:
    """Return the layers that a model holds; Megatron numbers them from 1 over the full model."""
    layers = []
    for local, layer in enumerate(model.decoder.layers):
        number = layer.layer_number - 1
        if number not in noops:
            layers.append((local, number - sum(noop < number for noop in noops)))
    return Chunk(tuple(layers), is_first=bool(model.pre_process), is_last=bool(model.post_process))


def _current_rank() -> Rank:
    from megatron.core import parallel_state

    return Rank(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        etp=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
    )


def _padded_rows(tensors: Mapping[str, torch.Tensor], config: ModelConfig, rank: Rank) -> int:
    """Return the rows of the model's embedding over all ranks, at least those of the weights."""
    for name in (EMBEDDING,) if config.num_labels else (EMBEDDING, OUTPUT):
        if name in tensors:
            rows = tensors[name].shape[0] * rank.tp_size
            if rows < config.vocab_size:
                raise ConfigError(
                    f"the model's vocabulary of {rows} is smaller than that of the weights, "
                    f"{config.vocab_size}: raise --padded-vocab-size"
                )
            return rows
    return config.vocab_size


def _unwrapped(model: Any) -> Any:
    """Unwrap a model from Float16Module, DistributedDataParallel and the like."""
    while not hasattr(model, "decoder"):
        if not hasattr(model, "module"):
            raise ConfigError(f"a {type(model).__name__} is not a GPTModel: it has no decoder")
        model = model.module
    return model
