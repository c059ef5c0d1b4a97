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
from mindspeed.training.save_dir_lock import SaveDirLock, release_on_error
from mindspeed.training.stages import ONLINE
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.training import model
from mindspeed_llm.training.architecture_options import check_architecture
from mindspeed_llm.training.checkpoint import MegatronCheckpoints
from mindspeed_llm.training.expert_checks import check_experts, check_group_score
from mindspeed_llm.training.lora import add_adapters
from mindspeed_llm.training.lora_plan import LoraPlan, check_has_no_adapters, check_same, plan_lora
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
        if lora is None:
            check_has_no_adapters(options)
        dims = parallel_dims(options, shape)
        context = chosen(options, dict(options))
        if dims.cp > 1:
            _check_context(options, splits_sequences)
        if shape.attention_sinks:
            _check_sinks(options, is_sampled=not is_training or options.stage in ONLINE)
        if shape.moe is not None:
            check_group_score(options, shape.moe, shape.family)
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


def check_further_tokens(options: TrainOptions, shape: ModelConfig) -> None:
    """Raise ConfigError for a factor of the loss of multi-token prediction where there is none."""
    if options.mtp_loss_scaling_factor is None:
        return
    flag = f"--mtp-loss-scaling-factor {options.mtp_loss_scaling_factor:g}"
    if not shape.mtp_num_layers:
        raise ConfigError(f"{flag}: this {shape.family} model has no such layers: drop it")
    if options.stage != "sft":
        raise ConfigError(f"{flag}: --stage {options.stage} keeps those layers: drop it")


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
