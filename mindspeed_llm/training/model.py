"""The models of a stage on this rank, wrapped for training, and their optimizers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from packaging.version import Version

from mindspeed import device
from mindspeed.compat import megatron
from mindspeed.config import ConfigError
from mindspeed.distributed.parallel_dims import ParallelDims, check_divides
from mindspeed.features.parallel.context_parallel import chosen
from mindspeed.ops.fusion_attention import flash4
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.megatron import gpt_model, same_named, transformer_config
from mindspeed_llm.training.architecture_options import ArchitectureOptions
from mindspeed_llm.training.options import TrainOptions
from mindspeed_llm.training.shared_prompts import shares_prompts

Provider = Callable[..., Any]
"""Builds the model of one pipeline stage from pre_process, post_process and vp_stage."""

FUSED_ROUTER_DEVICES = ("cuda",)
"""Where routers are fused without --moe-router-fusion."""


@dataclass(frozen=True)
class ModelRole:
    """One of the models that a stage needs, such as a policy, a reference or a critic.

    The first role of a stage is its primary model: --load names its weights, adapters are added
    to it, and its tensors have no prefix in checkpoints.
    """

    name: str
    trainable: bool = True
    """Has gradients and an optimizer; otherwise its weights are frozen."""
    saved: bool = True
    """Is part of checkpoints; otherwise a resumed run loads it from its source again."""
    source: str = "load"
    """Option that names its weights; where that is not given, it starts as the primary model."""


@dataclass
class RoleModel:
    """The model of a role on this rank, and its optimizer if it is trained."""

    role: ModelRole
    config: Any
    """Megatron's TransformerConfig."""
    chunks: list[Any]
    """One GPTModel for every virtual pipeline stage."""
    wrapped: list[Any]
    """The chunks as they are called: wrapped for mixed precision and data parallelism."""
    optimizer: Any = None

    @cached_property
    def routers(self) -> list[Any]:
        """Return the routers of this rank, also those of multi-token prediction."""
        return routers(self.chunks)

    @property
    def biased_routers(self) -> list[Any]:
        """The routers that choose experts by scores and a bias, which no optimizer trains."""
        return self.routers if self.config.moe_router_enable_expert_bias else []


def with_grouped_experts(options: TrainOptions, shape: ModelConfig) -> TrainOptions:
    """Decide whether a mixture multiplies by all experts at once, where that was left open.

    Megatron's default, one expert after the other, leaves out every fusion of experts.
    """
    if shape.moe is None or options.moe_grouped_gemm is not None:
        return options
    is_grouped = options.transformer_impl == "transformer_engine"
    return options.model_copy(update={"moe_grouped_gemm": is_grouped})


def make_config(options: TrainOptions, shape: ModelConfig, dims: ParallelDims) -> Any:
    """Return Megatron's configuration of the model under these parallel sizes.

    Options that Megatron has under the same name reach it by that name, but for those that describe
    the model, which the shape decides; what follows here is derived, or differs from the option.
    """
    options = with_grouped_experts(options, shape)  # a reward model may have them, not the policy
    dtype, context = _dtype(options), chosen(options, dict(options))
    if options.transformer_impl == "local" and options.neat_pack:
        raise ConfigError("--neat-pack needs --transformer-impl transformer_engine")
    recompute = "selective" if options.recompute_activations else options.recompute_granularity
    _check_recompute(options, shape, dims)
    described = ArchitectureOptions.model_fields
    with accepted_by_megatron():
        return transformer_config(
            shape,
            noop_layers=options.noop_layers,
            options={name: given for name, given in options if name not in described},
            params_dtype=dtype,
            pipeline_dtype=dtype,
            virtual_pipeline_model_parallel_size=dims.vpp,
            cp_comm_type=context.comm_type,
            hierarchical_context_parallel_sizes=context.hierarchical_sizes,
            sequence_parallel=options.sequence_parallel and dims.tp > 1,
            overlap_p2p_comm=dims.vpp is not None,
            batch_p2p_comm=dims.vpp is None,
            variable_seq_lengths=_varies(options, shape) and dims.pp > 1,
            recompute_granularity=recompute,
            gradient_accumulation_fusion=_fuses_gradients(options),
            # Megatron's scripts set these; TransformerConfig itself defaults to the unfused paths.
            bias_activation_fusion=_fuses_activation(options, shape),
            bias_dropout_fusion=not options.no_bias_dropout_fusion
            and not _has_biased_experts(shape),
            **_auxiliary_losses(options, shape, dims),
            **_further_tokens(options),
            **_fused_router(options, shape),
        )


def _check_recompute(options: TrainOptions, shape: ModelConfig, dims: ParallelDims) -> None:
    """Refuse groups of layers that do not fill a stage: Megatron looks for more layers there."""
    at_once = options.recompute_num_layers
    if options.recompute_method == "uniform" and at_once is not None:
        layers = (shape.num_layers + len(options.noop_layers)) // dims.pp // (dims.vpp or 1)
        what = f"the {layers} layers of a pipeline stage"
        check_divides("--recompute-num-layers", at_once, layers, what)


@contextmanager
def accepted_by_megatron() -> Iterator[None]:
    """Raise ConfigError for what Megatron refuses while it is set up."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, AssertionError) as error:
        reason = " ".join(str(error).split()) or "no reason given"
        raise ConfigError(f"Megatron refuses these options: {reason}") from error


def build_gpt(
    options: TrainOptions,
    shape: ModelConfig,
    config: Any,
    vocab_size: int,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
) -> Any:
    """Build the GPTModel of one pipeline stage."""
    if options.neat_pack:
        _prepare_packed_attention(config)
    return gpt_model(
        shape,
        config,
        impl=options.transformer_impl,
        vocab_size=vocab_size,
        max_sequence_length=options.max_position_embeddings,
        vp_stage=vp_stage,
        seed=options.seed,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
    )


def _prepare_packed_attention(config: Any) -> None:
    """Start to compile the kernels of packed documents: layers do not know that they will come."""
    if config.attention_dropout or config.multi_latent_attention or config.window_size is not None:
        return
    ranks = config.tensor_model_parallel_size
    sizes = config.num_attention_heads // ranks, max(config.num_query_groups // ranks, 1)
    flash4.prepare(config.params_dtype, *sizes, config.kv_channels, is_packed=True)


def build_chunks(provider: Provider, dims: ParallelDims) -> list[Any]:
    """Build the model of every (virtual) pipeline stage of this rank, on its device."""
    from megatron.core import parallel_state

    chunks = []
    stages = range(dims.vpp) if dims.vpp else [None]
    for stage in stages:
        if stage is not None:  # older releases read this global, newer ones take an argument
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        is_first, is_last = _is_first_and_last(dims, stage)
        chunk = provider(pre_process=is_first, post_process=is_last, vp_stage=stage)
        chunks.append(chunk.to(device.current().torch_device))
    return chunks


def wrap(chunks: list[Any], config: Any, options: TrainOptions) -> list[Any]:
    """Wrap chunks for mixed precision and data parallelism, as Megatron's training does."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        **same_named(DistributedDataParallelConfig, dict(options)),
        grad_reduce_in_fp32=options.bf16 or options.accumulate_allreduce_grads_in_fp32,
        bucket_size=40_000_000 if options.overlap_grad_reduce else None,
    )
    return [
        DistributedDataParallel(
            config,
            settings,
            chunk,
            # Only the first chunk's gradients come last, when nothing is left to hide behind.
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(_in_precision(chunks, config))
    ]


def freeze(chunks: list[Any], config: Any) -> list[Any]:
    """Wrap chunks that are not trained: for mixed precision only, without gradients."""
    for chunk in chunks:
        chunk.requires_grad_(False).eval()
    return _in_precision(chunks, config)


def set_routers_trained(chunks: list[Any], is_trained: bool) -> None:
    """Train the weights of all routers, or keep them as they are."""
    for router in routers(chunks):
        router.requires_grad_(is_trained)


def routers(chunks: list[Any]) -> list[Any]:
    """Return the routers of some chunks, also those of multi-token prediction."""
    from megatron.core.transformer.moe.router import Router

    modules = (module for chunk in chunks for module in chunk.modules())
    return [module for module in modules if isinstance(module, Router)]


def freeze_further_tokens(chunks: list[Any]) -> None:
    """Keep the layers of multi-token prediction, where no loss trains them, from decaying."""
    for chunk in chunks:
        if getattr(chunk, "mtp", None) is not None:  # on the last pipeline stage
            chunk.mtp.requires_grad_(False)


@contextmanager
def unrounded_routers(chunks: list[Any]) -> Iterator[None]:
    """Keep the buffers of routers as they are while chunks are converted to half precision.

    Rounded, the biases by which experts are chosen would choose others, and tokens be miscounted.
    """
    kept = [(router, dict(router.named_buffers())) for router in routers(chunks)]
    yield
    for router, buffers in kept:
        for name, buffer in buffers.items():
            setattr(router, name, buffer)


def _in_precision(chunks: list[Any], config: Any) -> list[Any]:
    from megatron.core.transformer.module import Float16Module

    if not (config.bf16 or config.fp16):
        return chunks
    with unrounded_routers(chunks):
        return [Float16Module(config, chunk) for chunk in chunks]


def make_optimizer(wrapped: list[Any], options: TrainOptions) -> Any:
    """Return Megatron's optimizer of the wrapped model."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = same_named(OptimizerConfig, dict(options)) | {"params_dtype": _dtype(options)}
    config = OptimizerConfig(**settings)
    optimizer = get_megatron_optimizer(config, wrapped)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.init_state_fn is None:  # Megatron can save the state of SGD, and not load it
            part.init_state_fn = _init_momentum
    return optimizer


def _init_momentum(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def connect(config: Any, wrapped: list[Any], optimizer: Any, options: TrainOptions) -> None:
    """Set the functions by which Megatron's schedules scale and reduce."""
    from megatron.core.distributed import finalize_model_grads

    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if config.context_parallel_size > 1:
        config.finalize_model_grads_func = finalize_split_sequences
    if options.overlap_grad_reduce:
        functions = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = functions if len(functions) > 1 else functions[0]


def finalize_split_sequences(
    wrapped: list[Any], num_tokens: torch.Tensor | None = None, **arguments: Any
) -> None:
    """Reduce gradients as Megatron does, and divide them by the tokens of all ranks.

    Megatron 0.12 adds up the tokens over data-parallel ranks only, later releases also over those
    that share a sequence.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(wrapped, None, **arguments)
    if num_tokens is None:
        return
    torch.distributed.broadcast(  # only the last stage counts
        num_tokens,
        parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(num_tokens, group=everyone)
    for chunk in wrapped:
        chunk.scale_gradients(1.0 / num_tokens.clamp(min=1))


def gather_parameters(model: RoleModel) -> None:
    """Gather updated weights, which --overlap-param-gather does in the next forward pass."""
    for chunk in model.wrapped:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def _auxiliary_losses(
    options: TrainOptions, shape: ModelConfig, dims: ParallelDims
) -> dict[str, Any]:
    """Return the coefficients of the routers' losses, larger where Megatron weakens them.

    Each of the ranks that share a sequence adds its part. With a mean over all tokens, Megatron
    before 0.19 weights it by the tokens of one of them; without, gradients are averaged over
    context-parallel ranks, for which 0.12 does not make up.
    """
    shares, version = 1, megatron.version()
    if options.calculate_per_token_loss and version < Version("0.19"):
        shares = dims.cp * (dims.tp if options.sequence_parallel else 1)
    elif version < Version("0.13"):
        shares = dims.cp
    if shape.moe is None:
        return {}
    given, z_loss = options.moe_aux_loss_coeff, options.moe_z_loss_coeff
    coefficient = shape.moe.aux_loss_coeff if given is None else given
    if options.moe_router_load_balancing_type == "none":
        coefficient = 0.0
    return {
        "moe_aux_loss_coeff": coefficient * shares,
        "moe_router_load_balancing_type": "aux_loss" if coefficient else "none",
        "moe_z_loss_coeff": z_loss * shares if z_loss else None,  # Megatron divides by it
    }


def _further_tokens(options: TrainOptions) -> dict[str, float]:
    """Leave multi-token prediction out of losses that are not those of the next token.

    Megatron adds its cross entropy to any loss: a rejected answer would be trained by it.
    """
    return {} if options.stage == "sft" else {"mtp_loss_scaling_factor": 0.0}


def has_frozen_routers(options: TrainOptions) -> bool:
    """Return whether routers keep the weights that were loaded."""
    has_adapters = options.lora_r is not None or options.lora_load is not None
    return options.freeze_router or (has_adapters and not options.lora_train_router)


def _fused_router(options: TrainOptions, shape: ModelConfig) -> dict[str, bool]:
    """Return Megatron's switch for a fused router, where it has one."""
    if not has_fused_router():
        return {}
    by_default = device.current().torch_device.type in FUSED_ROUTER_DEVICES
    if shape.moe is not None and shape.moe.other_group_score:  # which no kernel has
        by_default = False
    given = options.moe_router_fusion
    return {"moe_router_fusion": by_default if given is None else given}


def has_fused_router() -> bool:
    """Return whether this Megatron can call another router than its own."""
    from megatron.core.transformer import TransformerConfig

    return "moe_router_fusion" in TransformerConfig.__dataclass_fields__


def can_overlap_experts() -> bool:
    """Return whether this Megatron can run layers of two micro-batches in turns."""
    from megatron.core.transformer import TransformerConfig

    return "overlap_moe_expert_parallel_comm" in TransformerConfig.__dataclass_fields__


def _is_first_and_last(dims: ParallelDims, stage: int | None) -> tuple[bool, bool]:
    """Return whether a chunk is the first and whether it is the last of the whole model."""
    from megatron.core import parallel_state

    rank = parallel_state.get_pipeline_model_parallel_rank()
    last = (dims.vpp or 1) - 1
    return rank == 0 and stage in (None, 0), rank == dims.pp - 1 and stage in (None, last)


def _varies(options: TrainOptions, shape: ModelConfig) -> bool:
    """Return whether micro-batches have rows of different lengths."""
    return options.variable_seq_lengths or shares_prompts(options, shape)


def _fuses_activation(options: TrainOptions, shape: ModelConfig) -> bool:
    """Return whether Megatron's fused activation is used: it clamps before it adds the bias."""
    return not options.no_bias_swiglu_fusion and shape.swiglu_limit is None


def _has_biased_experts(shape: ModelConfig) -> bool:
    """Return whether experts have biases, which Megatron's grouped ones add by themselves."""
    return shape.moe is not None and shape.linear_bias


def _fuses_gradients(options: TrainOptions) -> bool:
    is_te = options.transformer_impl == "transformer_engine"
    return is_te and not options.no_gradient_accumulation_fusion


def _dtype(options: TrainOptions) -> torch.dtype:
    return torch.bfloat16 if options.bf16 else torch.float16 if options.fp16 else torch.float32
