"""Everything a run needs, made once from its options."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed import device
from mindspeed.checkpoint.detection import HF_FOLDER, check_directory
from mindspeed.checkpoint.digests import verify_small
from mindspeed.config import ConfigError, Spelling, build
from mindspeed.distributed import environment
from mindspeed.distributed.context_rules import check_dropout
from mindspeed.distributed.parallel_dims import CP, ParallelDims, check_model, virtual_stages
from mindspeed.distributed.process_groups import init_distributed, init_model_parallel
from mindspeed.distributed.seeds import seed_everything
from mindspeed.features.activation import current
from mindspeed.features.base import Context
from mindspeed.features.parallel.context_parallel import chosen
from mindspeed.training.checkpoint_dir import (
    TrainState,
    agree_on_resume,
    find_resume,
    read_state,
    resume,
    verify_state,
)
from mindspeed.training.expert_options import check_has_no_experts, check_shared_sequence
from mindspeed.training.save_dir_lock import SaveDirLock, release_on_error
from mindspeed.training.stages import ONLINE
from mindspeed_llm.models.config import ModelConfig, MoEConfig
from mindspeed_llm.training import model
from mindspeed_llm.training.architecture_options import check_architecture
from mindspeed_llm.training.checkpoint import MegatronCheckpoints
from mindspeed_llm.training.lora import add_adapters
from mindspeed_llm.training.lora_plan import LoraPlan, check_same, plan_lora
from mindspeed_llm.training.model import ModelRole, RoleModel
from mindspeed_llm.training.model_shape import find_shape, vocabulary
from mindspeed_llm.training.options import TrainOptions
from mindspeed_llm.training.shared_prompts import shares_prompts

logger = logging.getLogger(__name__)


@dataclass
class Setup:
    """What does not depend on weights: the shape, the parallel sizes, Megatron's configuration."""

    options: TrainOptions
    shape: ModelConfig
    config_folder: Path | None
    dims: ParallelDims
    vocab_size: int
    config: Any
    lora: LoraPlan | None
    """The adapters to train, if not the weights."""
    save_dir_lock: SaveDirLock | None
    """The first rank's lock on --save."""


@dataclass
class Training:
    """The models of this rank, and where their training is."""

    models: dict[str, RoleModel]
    checkpoints: MegatronCheckpoints
    state: TrainState


def prepare(
    options: TrainOptions, *, is_training: bool = True, splits_sequences: bool = False
) -> Setup:
    """Check the options against the model and the ranks, and init the process groups.

    `splits_sequences` is whether the task can be trained with context parallelism.
    """
    is_first = environment.is_rank_zero()
    if options.load is not None and is_first and not options.from_scratch:
        # The lock makes --save, which may be the same directory.
        check_directory(options.load, "--load")
    save_dir_lock = SaveDirLock(options.save) if options.save and is_first else None
    with release_on_error(save_dir_lock):
        resumed = find_resume(options, is_training=is_training)
        if resumed is not None:
            verify_state(resumed, options)
        shape, folder = (
            find_shape(options) if resumed is None else _shape_of_checkpoint(options, resumed)
        )
        options = model.with_grouped_experts(options, shape)
        lora = plan_lora(options, shape)
        if resumed is not None and is_training:  # others read merged weights
            check_same(lora, read_state(resumed).lora)
        dims = parallel_dims(options, shape)
        context = chosen(options, dict(options))
        if dims.cp > 1:
            _check_context(options, splits_sequences)
        if shape.attention_sinks:
            _check_sinks(options, is_sampled=not is_training or options.stage in ONLINE)
        if shape.moe is not None:
            _check_group_score(options, shape.moe, shape.family)
        activate_features(options, shape, dims)
        if is_training:
            check_experts(options, shape)
            check_further_tokens(options, shape)
        vocab_size = vocabulary(options, shape)
        timeout = options.distributed_timeout_minutes
        init_distributed(device.current(), timeout_minutes=timeout)
        init_model_parallel(
            dims, timeout_minutes=timeout, hierarchical_sizes=context.hierarchical_sizes
        )
        config = model.make_config(options, shape, dims)
        return Setup(options, shape, folder, dims, vocab_size, config, lora, save_dir_lock)


def parallel_dims(options: TrainOptions, shape: ModelConfig) -> ParallelDims:
    """Check that the ranks can hold the model and share the batch."""
    tp, pp = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    layers = _num_layers(options, shape)
    ep, world = options.expert_model_parallel_size, environment.world_size()
    are_split = shape.moe is not None and not options.moe_tp_extend_ep  # which keeps experts whole
    check_model(
        world=world,
        tp=tp,
        pp=pp,
        cp=options.context_parallel_size,
        ep=ep,
        num_layers=layers,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_experts=shape.moe.num_experts if shape.moe else 0,
        etp=options.expert_tensor_parallel_size,
        moe_ffn_hidden_size=shape.moe.ffn_hidden_size if shape.moe and are_split else None,
    )
    return ParallelDims(
        world=world,
        rank=environment.rank(),
        tp=tp,
        pp=pp,
        vpp=virtual_stages(layers, pp, options.num_layers_per_virtual_pipeline_stage),
        cp=options.context_parallel_size,
        ep=ep,
        etp=options.expert_tensor_parallel_size,
        micro_batch_size=options.micro_batch_size,
        # None: one micro-batch of every data-parallel rank
        global_batch_size=options.global_batch_size,  # type: ignore[arg-type]
    )


def _check_context(options: TrainOptions, splits_sequences: bool) -> None:
    """Raise ConfigError for what cannot be trained on parts of sequences."""
    size = options.context_parallel_size
    for flag in ("attention_dropout", "hidden_dropout", "lora_dropout"):
        check_dropout(getattr(options, flag), size, f"--{flag.replace('_', '-')} ")
    if not splits_sequences:
        raise ConfigError(f"{CP} {size}: --stage {options.stage} needs whole sequences: use 1")


def _check_sinks(options: TrainOptions, *, is_sampled: bool) -> None:
    """Refuse what Megatron's own attention, the one that has sinks, does not compute."""
    if is_sampled:
        raise ConfigError(
            "tokens are not sampled from a model with attention sinks: convert it, and sample with "
            "transformers"
        )
    names = ("neat_pack", "variable_seq_lengths", "reset_attention_mask", "reset_position_ids")
    given = [Spelling.FLAG.name_of(name) for name in names if getattr(options, name)]
    if options.context_parallel_size > 1:
        given.append(f"{CP} {options.context_parallel_size}")
    if given:
        raise ConfigError(f"{given[0]}: attention with sinks needs whole, single samples: drop it")


def document_layout(options: TrainOptions) -> str:
    """Return how ranks share packed documents: these loaders cut as few as they can."""
    return options.cp_document_layout or "whole"


def activate_features(options: TrainOptions, shape: ModelConfig, dims: ParallelDims) -> None:
    """Put the features in force that the options ask for."""
    current().activate(*requested_features(options, shape, dims))


def requested_features(
    options: TrainOptions, shape: ModelConfig, dims: ParallelDims
) -> tuple[Any, Context]:
    """Return the options of features, and what their checks know of the run."""
    known = (
        options.model_dump()
        | _sizes(shape)
        | {
            "world_size": dims.world,
            "num_layers": _num_layers(options, shape),
            "padded_vocab_size": vocabulary(options, shape),
            "hidden_vocab_rows": vocabulary(options, shape) - shape.vocab_size,
            "shares_prompts": shares_prompts(options, shape),
        }
    )
    options_class = current().registry.options_class
    given = {options.name_given(n): getattr(options, n) for n in options_class.model_fields}
    if dims.cp > 1:
        given["cp_document_layout"] = document_layout(options)
    if shape.moe is not None and options.moe_router_group_score is None:
        given["moe_router_group_score"] = shape.moe.other_group_score
    return build(options_class, given), Context(Spelling.FLAG, megatron=known)


def _sizes(shape: ModelConfig) -> dict[str, Any]:
    """Return the sizes of a model under Megatron's names."""
    moe, mla = shape.moe, shape.mla
    return {
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.kv_channels,
        "group_query_attention": True,
        "multi_latent_attention": mla is not None,
        "qk_head_dim": mla.qk_head_dim if mla else None,
        "qk_pos_emb_head_dim": mla.qk_pos_emb_head_dim if mla else None,
        "v_head_dim": mla.v_head_dim if mla else None,
        "swiglu": True,  # as in every family here, asked for by a flag or not
        "normalization": "RMSNorm",
        "num_experts": moe.num_experts if moe else None,
        "moe_router_topk": moe.topk if moe else None,
        "moe_ffn_hidden_size": moe.ffn_hidden_size if moe else None,
        "mtp_num_layers": shape.mtp_num_layers,
        "untie_embeddings_and_output_weights": not shape.tied,
    }


def check_experts(options: TrainOptions, shape: ModelConfig) -> None:
    """Raise ConfigError for a mixture of experts under parallel sizes that Megatron refuses."""
    if shape.moe is None:
        check_has_no_experts(options)
    else:
        _check_dispatch(options)
        _check_overlap(options)
        _check_capacity(options, shape.moe)
        _check_local_experts(options)
        _check_biases(options, shape)
        _check_router(options, shape.moe, shape.family)
        _check_shared_experts(options, shape.moe, shape.family)
        check_shared_sequence(options.tensor_model_parallel_size, options.sequence_parallel)


def check_further_tokens(options: TrainOptions, shape: ModelConfig) -> None:
    """Raise ConfigError for a factor of the loss of multi-token prediction where there is none."""
    if options.mtp_loss_scaling_factor is None:
        return
    flag = f"--mtp-loss-scaling-factor {options.mtp_loss_scaling_factor:g}"
    if not shape.mtp_num_layers:
        raise ConfigError(f"{flag}: this {shape.family} model has no such layers: drop it")
    if options.stage != "sft":
        raise ConfigError(f"{flag}: --stage {options.stage} keeps those layers: drop it")


def _check_local_experts(options: TrainOptions) -> None:
    is_local = options.transformer_impl == "local"
    if is_local and options.moe_grouped_gemm and not options.bf16:
        raise ConfigError(
            "--moe-grouped-gemm: with --transformer-impl local Megatron has it for --bf16 only: "
            "add that, or drop one of the two"
        )


def _check_biases(options: TrainOptions, shape: ModelConfig) -> None:
    """Refuse to split experts with biases, which every rank would add, and local ones."""
    if shape.linear_bias and options.transformer_impl == "local":
        # Megatron adds the bias in place to a view that autograd does not allow to be changed.
        raise ConfigError("experts with biases need --transformer-impl transformer_engine")
    size = options.expert_tensor_parallel_size or options.tensor_model_parallel_size
    if shape.linear_bias and size > 1 and not options.moe_tp_extend_ep:
        raise ConfigError(
            f"experts with biases cannot be split over {size} ranks: add "
            "--expert-tensor-parallel-size 1, or --moe-tp-extend-ep"
        )


def _check_router(options: TrainOptions, moe: MoEConfig, family: str) -> None:
    if options.moe_router_bias_update_rate is not None and not moe.expert_bias:
        raise ConfigError(
            f"--moe-router-bias-update-rate {options.moe_router_bias_update_rate:g}: routers of "
            f"this {family} model choose experts without a bias: drop it"
        )
    if options.moe_router_load_balancing_type == "none" and options.moe_aux_loss_coeff:
        raise ConfigError(
            f"--moe-aux-loss-coeff {options.moe_aux_loss_coeff:g}: with "
            "--moe-router-load-balancing-type none no loss balances the load: drop one of the two"
        )
    if options.moe_router_fusion and not model.has_fused_router():
        raise ConfigError(
            "--moe-router-fusion: this megatron-core has no fused router: use 0.16, or drop it"
        )


def _check_group_score(options: TrainOptions, moe: MoEConfig, family: str) -> None:
    given, has = options.moe_router_group_score, moe.group_score if moe.limits_groups else "none"
    if given is not None and given != has:
        raise ConfigError(
            f"--moe-router-group-score {given}: this {family} model has {has}, which its "
            "config.json decides: drop it"
        )
    if options.moe_router_fusion and moe.other_group_score:
        raise ConfigError(
            f"--moe-router-fusion: this {family} model scores groups of experts by "
            f"{moe.group_score}, which the fused kernel does not know: drop it"
        )


def _check_shared_experts(options: TrainOptions, moe: MoEConfig, family: str) -> None:
    """Refuse another number of shared experts than the model has."""
    given = options.n_shared_experts
    has = (moe.shared_ffn_hidden_size or 0) / moe.ffn_hidden_size
    if given is not None and given != has:
        raise ConfigError(
            f"--n-shared-experts {given}: this {family} model has {has:g}, which its config.json "
            "decides: drop it"
        )
    if options.moe_shared_expert_overlap and not has:
        raise ConfigError(
            f"--moe-shared-expert-overlap: this {family} model has no shared experts: drop it"
        )
    dispatcher = options.moe_token_dispatcher_type
    if options.moe_shared_expert_overlap and dispatcher != "alltoall":
        raise ConfigError(
            f"--moe-shared-expert-overlap: --moe-token-dispatcher-type {dispatcher} has no "
            "collectives to run shared experts beside: use alltoall, or drop it"
        )


def _check_dispatch(options: TrainOptions) -> None:
    """Refuse collectives of equal sizes where ranks have different numbers of tokens."""
    samples = options.stage in ONLINE
    tp = options.tensor_model_parallel_size
    is_wider = (options.expert_tensor_parallel_size or tp) > tp
    is_shared = options.expert_model_parallel_size > 1 or is_wider
    if is_shared and (samples or options.variable_seq_lengths):
        why = f"--stage {options.stage}" if samples else "--variable-seq-lengths"
        if options.moe_token_dispatcher_type != "alltoall":
            raise ConfigError(
                f"--moe-token-dispatcher-type {options.moe_token_dispatcher_type}: with {why} "
                "ranks have different numbers of tokens: use alltoall"
            )
        if options.moe_pad_expert_input_to_capacity:
            raise ConfigError(
                f"--moe-pad-expert-input-to-capacity: with {why} ranks have different numbers of "
                "tokens: drop it"
            )
    if samples and options.moe_expert_capacity_factor is not None:
        raise ConfigError(
            f"--moe-expert-capacity-factor {options.moe_expert_capacity_factor:g}: a completion "
            f"would depend on those sampled beside it: drop it for --stage {options.stage}"
        )
    _check_precomputed(options)


def _check_precomputed(options: TrainOptions) -> None:
    """Refuse to keep values that depend on the pairs, or places in a row, of one micro-batch."""
    given = []
    if options.moe_expert_capacity_factor is not None:
        given.append(f"--moe-expert-capacity-factor {options.moe_expert_capacity_factor:g}")
    if options.fix_router:
        given.append("--fix-router")
    if given and options.precompute_ref_log_probs:
        raise ConfigError(
            f"{given[0]}: what the reference says about a pair would depend on its micro-batch, "
            "and --precompute-ref-log-probs keeps it for all later ones: drop one"
        )


def _check_overlap(options: TrainOptions) -> None:
    """Refuse to take micro-batches in turns where no schedule does; Megatron refuses the rest."""
    flag = "--overlap-moe-expert-parallel-comm"
    if not options.overlap_moe_expert_parallel_comm:
        if options.delay_wgrad_compute:
            raise ConfigError(f"--delay-wgrad-compute: is for {flag}: add that, or drop it")
        return
    if not model.can_overlap_experts():
        raise ConfigError(f"{flag}: this megatron-core has no such schedule: use 0.16, or drop it")
    if options.stage != "sft":
        raise ConfigError(
            f"{flag}: is for pretraining and --stage sft, not {options.stage}: drop it"
        )
    if options.lora_r is not None or options.lora_load is not None:
        raise ConfigError(
            f"{flag}: Megatron wants a gradient of the embedding, which is frozen beside adapters: "
            "drop it"
        )
    if not (options.bf16 or options.fp16):
        raise ConfigError(f"{flag}: Megatron has it for --bf16 and --fp16: add one, or drop it")
    if options.expert_model_parallel_size == 1:
        raise ConfigError(
            f"{flag}: with --expert-model-parallel-size 1 no rank sends tokens to another: use 2 "
            "or more, or drop it"
        )
    has_smaller_stages = options.num_layers_per_virtual_pipeline_stage is not None
    if options.pipeline_model_parallel_size > 1 and not has_smaller_stages:
        raise ConfigError(
            f"{flag}: Megatron has it for pipelines of several smaller stages a rank: add "
            "--num-layers-per-virtual-pipeline-stage, or drop it"
        )
    if options.delay_wgrad_compute and options.transformer_impl == "local":
        raise ConfigError("--delay-wgrad-compute needs --transformer-impl transformer_engine")


def _check_capacity(options: TrainOptions, moe: MoEConfig) -> None:
    """Refuse to pad experts to no capacity, or to more tokens than there are."""
    factor = options.moe_expert_capacity_factor
    if not options.moe_pad_expert_input_to_capacity:
        return
    if factor is None:
        raise ConfigError(
            "--moe-pad-expert-input-to-capacity: there is no capacity: add "
            "--moe-expert-capacity-factor, or drop it"
        )
    if factor > moe.num_experts / moe.topk:
        raise ConfigError(
            f"--moe-expert-capacity-factor {factor:g}: with {moe.num_experts} experts, {moe.topk} "
            f"a token, none gets more than {moe.num_experts}/{moe.topk} of its even share: use at "
            "most that, or drop --moe-pad-expert-input-to-capacity"
        )


def _num_layers(options: TrainOptions, shape: ModelConfig) -> int:
    return shape.num_layers + len(options.noop_layers)


def build_models(
    setup: Setup,
    roles: Sequence[ModelRole],
    provider: Callable[..., Any],
    shape_of: Callable[[ModelRole], ModelConfig],
) -> Training:
    """Build the models of a stage, and fill them from their sources or from the checkpoint."""
    options = setup.options
    resumed = agree_on_resume(options)
    models = {}
    for role in roles:
        is_primary, shape = role is roles[0], shape_of(role)
        is_setup = is_primary and shape == setup.shape
        config = setup.config if is_setup else model.make_config(options, shape, setup.dims)
        seed_everything(options.seed)
        with model.accepted_by_megatron():
            build = partial(provider, role=role, config=config)
            chunks = model.build_chunks(build, setup.dims)
        is_given = role.source != "load" and getattr(options, role.source) is not None
        if (resumed is None or not role.saved) and (is_given or not options.from_scratch):
            _load_weights(chunks, role, shape, options)
        if is_primary and setup.lora is not None:
            add_adapters(chunks, setup.lora, shape, options)
        models[role.name] = _make_trainable(role, config, chunks, options)
    saved = [each for each in models.values() if each.role.saved]
    checkpoints = MegatronCheckpoints(options.save, saved)
    state = TrainState() if resumed is None else resume(checkpoints, resumed, options)
    return Training(models, checkpoints, state)


def _load_weights(
    chunks: list[Any], role: ModelRole, shape: ModelConfig, options: TrainOptions
) -> None:
    from mindspeed_llm.checkpoint.loading import load_weights

    source = getattr(options, role.source) or options.load
    assert source is not None  # check: --load or --from-scratch is given
    load_weights(
        chunks,
        source,
        config=shape,
        noop_layers=options.noop_layers,
        verify=not options.no_verify,
        is_shared=True,
    )
    logger.info("%s: weights from %s", role.name, source)


def _make_trainable(
    role: ModelRole, config: Any, chunks: list[Any], options: TrainOptions
) -> RoleModel:
    """Wrap the chunks of a role as it is used, with an optimizer if it is trained."""
    if not role.trainable:
        return RoleModel(role, config, chunks, model.freeze(chunks, config))
    if options.freeze_router:
        model.set_routers_trained(chunks, False)
    if config.mtp_num_layers and not config.mtp_loss_scaling_factor:
        model.freeze_further_tokens(chunks)
    with model.accepted_by_megatron():
        wrapped = model.wrap(chunks, config, options)
        optimizer = model.make_optimizer(wrapped, options)
    model.connect(config, wrapped, optimizer, options)
    return RoleModel(role, config, chunks, wrapped, optimizer)


def _shape_of_checkpoint(options: TrainOptions, resumed: Path) -> tuple[ModelConfig, Path | None]:
    """Return the shape that a training checkpoint stores, and the folder of its config.json."""
    shape = build(ModelConfig, read_state(resumed).shape, source=str(resumed))
    check_architecture(options, shape)
    folder = resumed.parent / HF_FOLDER
    verify_small(folder, enabled=not options.no_verify)
    return shape, folder if (folder / "config.json").is_file() else None


def check_data(state: TrainState, fingerprint: str, options: TrainOptions) -> None:
    """Raise ConfigError if a run would resume with other data than it had."""
    if state.data and state.data != fingerprint:
        raise ConfigError(
            f"--save {options.save} holds a run on other data than --data-path "
            f"{' '.join(options.data_path)}: choose another --save, or load that checkpoint with "
            "--finetune"
        )


def check_stage_name(options: TrainOptions, stage: str) -> None:
    """Raise ConfigError if a run would resume as another stage than it was."""
    resumed = find_resume(options)
    if resumed is None:
        return
    before = read_state(resumed).stage_name
    if before and stage != before:
        raise ConfigError(
            f"{resumed.parent}: holds a run of --stage {before}, not {stage or 'pretraining'}: to "
            "start from its weights give it as --load with --finetune, and another --save"
        )


def check_reference(state: TrainState, fingerprint: str, options: TrainOptions) -> None:
    """Raise ConfigError if a run would resume with another reference than it had."""
    # Before stages were stored "" did not say that there is no reference but the policy itself.
    if state.reference != fingerprint and (state.reference or state.stage_name):
        flag = "--load" if options.ref_model is None else "--ref-model"
        raise ConfigError(
            f"--save {options.save} holds a run with another reference than {flag} "
            f"{options.ref_model or options.load}: give the one it began with, or choose another "
            "--save"
        )
