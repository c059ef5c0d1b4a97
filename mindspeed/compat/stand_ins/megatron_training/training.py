"""Build the model chunks of this pipeline rank, cast them and wrap them for data parallelism."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config

from mindspeed import device


def get_model(
    model_provider_func: Callable[..., torch.nn.Module],
    model_type: ModelType = ModelType.encoder_or_decoder,
    wrap_with_ddp: bool = True,
) -> list[torch.nn.Module]:
    """Return the chunks on this rank; `fp16` or `bf16` of the model's own config decides the cast.

    The full package reads a global argument namespace for that; here the config is all there is.
    """
    chunks = _build_chunks(model_provider_func, model_type)
    config = get_model_config(chunks[0])
    for chunk in chunks:
        chunk.to(device.current().torch_device)
    if config.fp16 or config.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    if wrap_with_ddp:
        chunks = [_data_parallel(config, chunk, index) for index, chunk in enumerate(chunks)]
    return chunks


def wrap_get_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build by the model's own configuration where Megatron's arguments were never parsed."""
    if original is get_model:  # under Megatron's name, where Megatron-LM is not installed
        return original

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import global_vars

        has_arguments = getattr(global_vars, "_GLOBAL_ARGS", None) is not None
        return (original if has_arguments else get_model)(*args, **kwargs)

    return build


def _build_chunks(
    provider: Callable[..., torch.nn.Module], model_type: ModelType
) -> list[torch.nn.Module]:
    virtual_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if virtual_size is None:
        return [_build_chunk(provider, model_type, None)]
    chunks = []
    for stage in range(virtual_size):
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        chunks.append(_build_chunk(provider, model_type, stage))
    return chunks


def _build_chunk(
    provider: Callable[..., torch.nn.Module], model_type: ModelType, stage: int | None
) -> torch.nn.Module:
    chunk = provider(**_arguments_for(provider, stage))
    chunk.model_type = model_type  # type: ignore[assignment]
    # Ranks that share a parameter have to agree that it is one.
    for parameter in chunk.parameters():
        if not hasattr(parameter, "tensor_model_parallel"):
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]
            parameter.partition_dim = -1  # type: ignore[attr-defined]
            parameter.partition_stride = 1  # type: ignore[attr-defined]
    return chunk


def _arguments_for(provider: Callable[..., torch.nn.Module], stage: int | None) -> dict[str, Any]:
    """Return what the provider takes of the usual arguments; it may as well take none."""
    of_stage: dict[str, Any] = {}
    if (
        stage is not None
        and "vp_stage" in inspect.signature(parallel_state.is_pipeline_first_stage).parameters
    ):
        of_stage = {"ignore_virtual": False, "vp_stage": stage}
    offered = {
        "pre_process": parallel_state.is_pipeline_first_stage(**of_stage),
        "post_process": parallel_state.is_pipeline_last_stage(**of_stage),
        "vp_stage": stage,
    }
    taken = inspect.signature(provider).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        taken = {name: value for name, value in offered.items() if name != "vp_stage"}  # type: ignore[assignment]
    return {name: value for name, value in offered.items() if name in taken}


def _data_parallel(config: Any, chunk: torch.nn.Module, index: int) -> DistributedDataParallel:
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(),
        chunk,
        # Chunks after the first finish their backward early; bucketing them would only add waits.
        disable_bucketing=index > 0,
    )
