"""The model of this rank, wrapped for training, and its optimizer."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed import device
from mindspeed.config import ConfigError
from mindspeed.distributed.parallel_dims import ParallelDims
from mindspeed_llm.models.megatron import gpt_model, transformer_config
from mindspeed_llm.models.shape import ModelShape
from mindspeed_llm.training.options import TrainOptions

Provider = Callable[..., Any]
"""Builds the model of one pipeline stage from pre_process, post_process and vp_stage."""


def make_config(options: TrainOptions, shape: ModelShape, dims: ParallelDims) -> Any:
    """Return Megatron's configuration of the model under these parallel sizes."""
    dtype = _dtype(options)
    if options.transformer_impl == "local" and options.neat_pack:
        raise ConfigError("--neat-pack needs --transformer-impl transformer_engine")
    recompute = "selective" if options.recompute_activations else options.recompute_granularity
    with accepted_by_megatron():
        return transformer_config(
            shape,
            noop_layers=options.noop_layers,
            bf16=options.bf16,
            fp16=options.fp16,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            attention_dropout=options.attention_dropout,
            hidden_dropout=options.hidden_dropout,
            init_method_std=options.init_method_std,
            attention_softmax_in_fp32=options.attention_softmax_in_fp32,
            tensor_model_parallel_size=dims.tp,
            pipeline_model_parallel_size=dims.pp,
            virtual_pipeline_model_parallel_size=dims.vpp,
            expert_model_parallel_size=dims.ep,
            sequence_parallel=options.sequence_parallel and dims.tp > 1,
            overlap_p2p_comm=dims.vpp is not None,
            batch_p2p_comm=dims.vpp is None,
            variable_seq_lengths=options.variable_seq_lengths and dims.pp > 1,
            moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths
            recompute_granularity=recompute,
            recompute_method=options.recompute_method,
            recompute_num_layers=options.recompute_num_layers,
            calculate_per_token_loss=options.calculate_per_token_loss,
            gradient_accumulation_fusion=_fuses_gradients(options),
            # Megatron's scripts set these; TransformerConfig itself defaults to the unfused paths.
            bias_activation_fusion=not options.no_bias_swiglu_fusion,
            bias_dropout_fusion=not options.no_bias_dropout_fusion,
        )


@contextmanager
def accepted_by_megatron() -> Iterator[None]:
    """Turn what Megatron refuses while it is set up into one line."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, AssertionError) as error:
        reason = " ".join(str(error).split()) or "it does not say why"
        raise ConfigError(f"Megatron refuses these options: {reason}") from error


def provide(options: TrainOptions, shape: ModelShape, config: Any, vocab_size: int) -> Provider:
    """Return what builds the GPTModel of a stage."""

    def build(
        pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> Any:
        return gpt_model(
            shape,
            config,
            impl=options.transformer_impl,
            vocab_size=vocab_size,
            max_sequence_length=options.max_position_embeddings,
            vp_stage=vp_stage,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
        )

    return build


def build_chunks(provider: Provider, dims: ParallelDims) -> list[Any]:
    """Build the model of every (virtual) pipeline stage of this rank, on its device."""
    from megatron.core import parallel_state

    chunks = []
    stages = range(dims.vpp) if dims.vpp else [None]
    for stage in stages:
        if stage is not None:  # older releases are told by this global, newer ones by an argument
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        is_first, is_last = _place(dims, stage)
        chunk = provider(pre_process=is_first, post_process=is_last, vp_stage=stage)
        chunks.append(chunk.to(device.current().torch_device))
    return chunks


def wrap(chunks: list[Any], config: Any, options: TrainOptions) -> list[Any]:
    """Wrap chunks for mixed precision and data parallelism, as Megatron's training does."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    is_half = options.bf16 or options.fp16
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=options.bf16 or options.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        use_distributed_optimizer=options.use_distributed_optimizer,
        bucket_size=40_000_000 if options.overlap_grad_reduce else None,
    )
    return [
        DistributedDataParallel(
            config,
            settings,
            Float16Module(config, chunk) if is_half else chunk,
            # Only the first chunk's gradients come last, when nothing is left to hide behind.
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(chunks)
    ]


def make_optimizer(wrapped: list[Any], options: TrainOptions) -> Any:
    """Return Megatron's optimizer of the wrapped model."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    names = {field.name for field in dataclasses.fields(OptimizerConfig)}
    same = names & type(options).model_fields.keys()
    settings = {name: getattr(options, name) for name in same}
    config = OptimizerConfig(**settings | {"params_dtype": _dtype(options)})
    optimizer = get_megatron_optimizer(config, wrapped)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.init_state_fn is None:  # Megatron can save the state of SGD, and not load it
            part.init_state_fn = _begin_momentum
    return optimizer


def _begin_momentum(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def connect(config: Any, wrapped: list[Any], optimizer: Any, options: TrainOptions) -> None:
    """Tell Megatron's schedules how to scale and reduce."""
    from megatron.core.distributed import finalize_model_grads

    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if options.overlap_grad_reduce:
        functions = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = functions if len(functions) > 1 else functions[0]


def _place(dims: ParallelDims, stage: int | None) -> tuple[bool, bool]:
    """Return whether a chunk is the first and whether it is the last of the whole model."""
    from megatron.core import parallel_state

    rank = parallel_state.get_pipeline_model_parallel_rank()
    last = (dims.vpp or 1) - 1
    return rank == 0 and stage in (None, 0), rank == dims.pp - 1 and stage in (None, last)


def _fuses_gradients(options: TrainOptions) -> bool:
    is_te = options.transformer_impl == "transformer_engine"
    return is_te and not options.no_gradient_accumulation_fusion


def _dtype(options: TrainOptions) -> torch.dtype:
    return torch.bfloat16 if options.bf16 else torch.float16 if options.fp16 else torch.float32
