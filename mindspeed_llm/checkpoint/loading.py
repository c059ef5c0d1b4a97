"""Load weights into the Megatron model of this rank."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.detection import detect
from mindspeed_llm.checkpoint.layout import Chunk, Rank
from mindspeed_llm.checkpoint.opening import open_source, verify_source
from mindspeed_llm.checkpoint.placement import EMBEDDING, OUTPUT, Placement, Style
from mindspeed_llm.checkpoint.source import Source, check_names, check_shape, only_tensors
from mindspeed_llm.models.families import family_named
from mindspeed_llm.models.shape import ModelShape


def load_weights(
    model_chunks: Sequence[torch.nn.Module],
    source: str | os.PathLike[str],
    *,
    shape: ModelShape | None = None,
    noop_layers: Sequence[int] = (),
    verify: bool = True,
    is_shared: bool = False,
) -> None:
    """Fill this rank's model from an HF directory or a Megatron checkpoint of any layout.

    `shape` is that of the model; without it the config.json beside the weights is read. Numbers
    are cast to the type of the parameters. A weight that is missing or has no place is an error.
    So is a file that differs from its digest, unless `verify` is false; with `is_shared` all ranks
    call this, and each verifies a share.
    """
    found = detect(source)
    opened = open_source(found, shape=shape)
    verify_source(found, opened, enabled=verify, is_shared=is_shared)
    for chunk in model_chunks:
        _fill(_unwrapped(chunk), opened, tuple(noop_layers))


def _fill(model: torch.nn.Module, source: Source, noops: tuple[int, ...]) -> None:
    shape, rank = source.shape, _this_rank()
    tensors = only_tensors(model.state_dict(keep_vars=True), "the model")
    has_mtp = any(name.startswith("mtp.") for name in tensors)
    if shape.mtp_num_layers and not has_mtp:
        shape = shape.model_copy(update={"mtp_num_layers": 0})  # weights nobody asked for
    weights = list(family_named(shape.family).table.weights(shape))
    placement = Placement(
        shape, weights, Style.found(tensors, shape), _vocabulary(tensors, shape, rank)
    )
    stored = placement.stored(_chunk_of(model, noops), rank)
    check_names(tensors, (tensor.name for tensor in stored), "the model")
    with torch.no_grad():
        for tensor in stored:
            check_shape("the model", tensor.name, tensors[tensor.name], tensor.shape)
            tensor.fill(tensors[tensor.name].data, source.wholes)
    source.let_go()


def _chunk_of(model: Any, noops: tuple[int, ...]) -> Chunk:
    """See which layers a model holds; Megatron numbers them from 1 over the whole model."""
    layers = []
    for local, layer in enumerate(model.decoder.layers):
        number = layer.layer_number - 1
        if number not in noops:
            layers.append((local, number - sum(noop < number for noop in noops)))
    return Chunk(tuple(layers), is_first=bool(model.pre_process), is_last=bool(model.post_process))


def _this_rank() -> Rank:
    from megatron.core import parallel_state

    return Rank(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        etp=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
    )


def _vocabulary(tensors: Mapping[str, torch.Tensor], shape: ModelShape, rank: Rank) -> int:
    """Return the rows of the model's embedding over all ranks, at least those of the weights."""
    for name in (EMBEDDING, OUTPUT):
        if name in tensors:
            rows = tensors[name].shape[0] * rank.tp_size
            if rows < shape.vocab_size:
                raise ConfigError(
                    f"the model's vocabulary of {rows} is smaller than that of the weights, "
                    f"{shape.vocab_size}: raise --padded-vocab-size"
                )
            return rows
    return shape.vocab_size


def _unwrapped(model: Any) -> Any:
    """Take a model out of Float16Module, DistributedDataParallel and the like."""
    while not hasattr(model, "decoder"):
        if not hasattr(model, "module"):
            raise ConfigError(f"a {type(model).__name__} is not a GPTModel: it has no decoder")
        model = model.module
    return model
