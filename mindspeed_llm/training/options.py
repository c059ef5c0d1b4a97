"""Typed options of training a language model, in sections: as an object, flags or a YAML file."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model

from mindspeed.config import Alias, ConfigError, Options, add_options, read_options, suggest_flags
from mindspeed.features.registry import registry
from mindspeed.training.expert_options import ExpertOptions
from mindspeed.training.options import (
    CheckpointOptions,
    LogOptions,
    OptimizerOptions,
    RunOptions,
    ScheduleOptions,
    check_precision,
    check_run,
)
from mindspeed_llm.data.instruction import split_parts, split_weights
from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.training.architecture_options import ArchitectureOptions
from mindspeed_llm.training.preference_options import (
    PREFERENCE_SECTIONS,
    AcceptedStageOptions,
    PreferenceOptions,
    check_preferences,
)
from mindspeed_llm.training.rollout_options import (
    ROLLOUT_SECTIONS,
    AcceptedRolloutOptions,
    OnlineOptions,
    check_rollouts,
)

TOKEN_STAGES = ("pretraining", "sft", "prm")
"""The tasks whose loss is a mean over the tokens of a micro-batch, or of a step."""


class ModelOptions(Options):
    """The model; every size is read from its config.json, and only checked where given here."""

    hf_cfg_dir: str | None = None
    """Folder with the config.json of the model, where --load has none."""
    model_type_hf: str | None = None
    """Family of the model, where its config.json does not name it."""
    num_layers: int | None = None
    """Layers, those of --noop-layers included."""
    hidden_size: int | None = None
    """Width of the model."""
    ffn_hidden_size: int | None = None
    """Width of its MLPs."""
    num_attention_heads: int | None = None
    """Query heads."""
    group_query_attention: bool = False
    """There are fewer key heads than query heads; --num-query-groups is their number."""
    num_query_groups: int | None = None
    """Key and value heads."""
    kv_channels: int | None = None
    """Size of a head."""
    num_experts: int | None = None
    """Routed experts of a layer."""
    moe_router_topk: int | None = None
    """Experts that a token visits."""
    moe_ffn_hidden_size: Annotated[int | None, Alias("moe_intermediate_size")] = None
    """Width of one routed expert."""
    max_position_embeddings: int | None = None
    """Longest sequence the model is meant for; may differ from its config.json."""
    vocab_size: int | None = None
    """Rows of the embedding, before padding."""
    padded_vocab_size: int | None = None
    """Rows of the embedding, with padding."""
    make_vocab_size_divisible_by: int = 1
    """Pad the embedding to a multiple of this and of --tensor-model-parallel-size."""
    norm_epsilon: float | None = None
    """Epsilon of the norms."""
    rotary_base: float | None = None
    """Base of the rotary embedding."""
    untie_embeddings_and_output_weights: bool = False
    """The output layer has weights of its own."""
    add_qkv_bias: bool = False
    """Query, key and value have a bias; found from the weights without this flag, too."""
    qk_layernorm: bool = False
    """Query and key heads are normalized."""
    swiglu: bool = False
    """MLPs are gated by SiLU, as in every family here."""
    normalization: Literal["RMSNorm"] | None = None
    """The norm, the same in every family here."""
    position_embedding_type: Literal["rope"] | None = None
    """The position embedding, the same in every family here."""
    disable_bias_linear: bool = False
    """Projections other than query, key and value have no bias."""
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"
    """Which of Megatron's layer specs to build; transformer_engine is served on every device."""
    bf16: bool = False
    """Compute in bfloat16, keep weights for the optimizer in float32."""
    fp16: bool = False
    """Compute in float16 with loss scaling, keep weights for the optimizer in float32."""
    attention_dropout: float = 0.0
    """Share of attention that is dropped."""
    hidden_dropout: float = 0.0
    """Share of hidden states that is dropped."""
    init_method_std: float = 0.02
    """Spread of new weights (--from-scratch)."""
    attention_softmax_in_fp32: bool = False
    """Compute the softmax of local attention in float32."""


class DataOptions(Options):
    """The data and its batches."""

    data_path: tuple[str, ...] = ()
    """Prefixes of token files, as given to preprocess as --output-prefix, or data files, which are
    preprocessed once; several with a weight in front of each: 0.3 one 0.7 two."""
    split: str = "100,0,0"
    """Shares of the data for training, validation and test."""
    seq_length: int | None = None
    """Longest sample, in tokens (default: the longest there is); pretraining cuts documents to
    it."""
    micro_batch_size: int = 1
    """Samples in one pass."""
    global_batch_size: int | None = None
    """Samples in one step over all ranks (default: one micro-batch a rank)."""
    variable_seq_lengths: bool = False
    """Samples of a micro-batch follow each other without padding, and do not see each other; with
    --transformer-impl local they are padded to the longest (also --no-pad-to-seq-lengths)."""
    pad_to_multiple_of: int = 16
    """Pad rows of several samples (--variable-seq-lengths, or pairs that share their prompt) to a
    multiple of this."""
    neat_pack: bool = False
    """Rows hold several samples that must not see each other; found from the data as well. Data
    files are packed so with --pack."""
    reset_position_ids: bool = False
    """The same as --reset-attention-mask: positions count from the start of a document."""
    reset_attention_mask: bool = False
    """Documents of a row do not see each other. Pretraining: they end where preprocess ended them;
    post-training: the same as --neat-pack."""
    balance_packs: bool = False
    """Pair packed rows of much and of little attention, and put equal pairs into a step, so that no
    rank waits for another; needs an even number of micro-batches a step."""
    calculate_per_token_loss: bool = False
    """Mean loss over all tokens of a step (pretraining, --stage sft and prm); without it the mean
    over micro-batches of the mean over their tokens, so that short samples weigh more."""
    mtp_loss_scaling_factor: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Factor of the loss of multi-token prediction (pretraining and --stage sft); 0 keeps its
    layers as they were loaded. Default: 0.1."""
    no_shuffle: bool = False
    """Read samples in the order of the files."""
    padded_samples: bool = False
    """Fill every epoch up to a multiple of the global batch, with its first samples."""
    tokenizer_name_or_path: str | None = None
    """Folder of the model's tokenizer, for data files (default: that of the model)."""
    allow_other_tokenizer: bool = False
    """Train on data whose tokenizer has other tokens or ids than the model's."""


RAW_FIELDS = (
    *("json_keys", "map_keys", "prompt_type", "prompt_type_path", "enable_thinking"),
    *("special_tokens", "too_long", "pack", "append_eod", "on_bad_line", "workers"),
    *("n_subs", "cache_dir", "trust_remote_code", "placeholder_token", "reward_tokens"),
)


class HandlerOptions(Options):
    """How data files are preprocessed; token files are used as they are."""

    handler_name: str | None = None
    """What the records are (default: AlpacaStyleInstructionHandler, for pretraining
    GeneralPretrainHandler)."""


def _preprocess_fields() -> dict[str, Any]:
    fields = PreprocessOptions.model_fields
    return {name: (fields[name].annotation, fields[name]) for name in RAW_FIELDS}


if TYPE_CHECKING:

    class RawOptions(HandlerOptions):
        """The handler and fields of preprocessing, which are known at run time only."""

        def __getattr__(self, name: str) -> Any: ...

else:
    RawOptions = create_model("RawOptions", __base__=HandlerOptions, **_preprocess_fields())
    RawOptions.__doc__ = HandlerOptions.__doc__


LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class LoraOptions(Options):
    """Low-rank adapters beside frozen weights; --lora-r or --lora-load switches them on."""

    lora_r: int | None = None
    """Rank of the adapters, such as 16; weights are frozen and only adapters are trained."""
    lora_alpha: float = 32
    """What an adapter adds is multiplied by this over the rank."""
    lora_dropout: float = 0.0
    """Share of an adapter's input that is dropped."""
    lora_target_modules: tuple[str, ...] = LORA_TARGETS
    """What gets adapters: Megatron's modules, or HF's such as q_proj and v_proj; those of experts
    not with --no-moe-grouped-gemm. Default: those of these that the model has."""
    lora_train_router: bool = False
    """Train the routers of a mixture of experts beside the adapters; without it they are frozen."""
    lora_load: str | None = None
    """Folder with adapters in peft's format to begin with; they have to fit the other options."""
    lora_fusion: bool = False
    """Accepted for existing scripts: the result is the same."""
    lora_register_forward_hook: tuple[Literal["word_embeddings", "input_layernorm"], ...] = ()
    """Accepted for existing scripts: gradients find their way without."""


class ParallelOptions(Options):
    """The layout and what overlaps; what is left over of the ranks is data parallel."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int = 1
    """Ranks that hold consecutive layers."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of one of several smaller stages of a pipeline rank."""
    context_parallel_size: int = 1
    """Ranks that share each sequence; --context-parallel-algo says how."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that share each expert's matrices. Default: --tensor-model-parallel-size."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks also share the activations between matrices."""
    use_distributed_optimizer: bool = False
    """Data-parallel ranks share the optimizer's state."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass runs."""
    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass runs."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """What is computed again in the backward pass: whole layers or attention only."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Which layers, for full recomputation."""
    recompute_num_layers: int | None = None
    """How many layers, for full recomputation."""
    recompute_activations: bool = False
    """The same as --recompute-granularity selective."""
    no_gradient_accumulation_fusion: bool = False
    """Add the gradients of weights in a step of its own."""
    no_bias_swiglu_fusion: bool = False
    """Compute SwiGLU by separate operations."""
    no_bias_dropout_fusion: bool = False
    """Add the residual by separate operations."""
    distributed_timeout_minutes: int = 10
    """How long ranks wait for each other."""


class LossScaleOptions(Options):
    """How gradients keep their precision in Megatron's optimizer."""

    loss_scale: float | None = None
    """Fixed scale of the loss with --fp16; without it, the scale is found."""
    initial_loss_scale: float = 2.0**32
    """Scale at which the search begins."""
    min_loss_scale: float = 1.0
    """Scale below which it never goes."""
    loss_scale_window: float = 1000
    """Steps without overflow after which the scale is doubled."""
    hysteresis: int = 2
    """Overflows after which it is halved."""
    accumulate_allreduce_grads_in_fp32: bool = False
    """Add and reduce gradients in float32; always so with --bf16."""


class ThroughputOptions(Options):
    """What is logged about the speed, beside tokens."""

    log_throughput: bool = False
    """Add the arithmetic throughput to the line: an estimate for tokens that are no padding.
    --op-cal-tflops counts what is computed."""


class AcceptedOptions(Options):
    """Accepted without effect."""

    use_mcore_models: bool = False
    """Accepted for existing scripts: there are no others."""
    is_instruction_dataset: bool = False
    """Accepted for existing scripts: the stage decides the kind of data."""
    tokenizer_type: Literal["PretrainedFromHF"] = "PretrainedFromHF"
    """Accepted for existing scripts: Hugging Face's tokenizers are the ones there are."""
    tokenizer_not_use_fast: bool = False
    """Accepted for existing scripts: fast and slow tokenizers give the same ids."""
    tokenizer_padding_side: Literal["right", "left"] = "right"
    """Accepted for existing scripts: rows are padded on the right, sampled prompts not at all."""
    no_create_attention_mask_in_dataloader: bool = False
    """Accepted for existing scripts: batches never have a mask of all pairs of tokens."""
    no_masked_softmax_fusion: bool = False
    """Accepted for existing scripts: there is no such kernel to switch off."""
    no_load_rng: bool = False
    """Accepted for existing scripts: random numbers depend on seed, step and rank only."""
    no_save_rng: bool = False
    """Accepted for existing scripts: random numbers depend on seed, step and rank only."""
    distributed_backend: str | None = None
    """Accepted for existing scripts: the device decides."""
    exit_on_missing_checkpoint: bool = False
    """Accepted for existing scripts: a missing checkpoint is always an error."""
    ckpt_format: Literal["torch_dist", "torch"] = "torch_dist"
    """Accepted for existing scripts: checkpoints are torch_dist, which every layout can load."""
    num_workers: int = 0
    """Accepted for existing scripts: samples are read from mapped files."""
    no_shared_storage: bool = False
    """Accepted for existing scripts: no index files are written."""
    use_rotary_position_embeddings: bool = False
    """Accepted for existing scripts: positions are rotary in every family here."""
    moe_router_dtype: Literal["fp32"] | None = None
    """Accepted for existing scripts: routers compute in float32."""
    mla_mm_split: bool = False
    """Accepted for existing scripts: the result is the same."""
    mla_fa_without_pad: bool = False
    """Accepted for existing scripts: the result is the same."""
    use_dist_ckpt: bool = False
    """Accepted for existing scripts: checkpoints are torch_dist."""
    data_cache_path: str | None = None
    """Accepted for existing scripts: no index files are written."""
    local_rank: int | None = None
    """Accepted for existing launchers: the environment decides."""


class UnusedOptions(AcceptedOptions, AcceptedStageOptions, AcceptedRolloutOptions):
    """Accepted without effect."""


class TaskOptions(Options):
    """What is trained."""

    stage: str = "sft"
    """The task of post-training: sft, dpo, simpo, kto, orm, prm, trl_ppo or grpo."""


SECTIONS = (
    CheckpointOptions,
    DataOptions,
    RawOptions,
    ScheduleOptions,
    LogOptions,
    *PREFERENCE_SECTIONS,
    *ROLLOUT_SECTIONS,
    LoraOptions,
    OptimizerOptions,
    ParallelOptions,
    ExpertOptions,
    ModelOptions,
    ArchitectureOptions,
    LossScaleOptions,
    ThroughputOptions,
    UnusedOptions,
)
"""The sections of --help; what most runs need comes first."""


class StageOptions(
    TaskOptions,
    OnlineOptions,
    PreferenceOptions,
    AcceptedOptions,
    RunOptions,
    ThroughputOptions,
    LossScaleOptions,
    ExpertOptions,
    ParallelOptions,
    LoraOptions,
    RawOptions,
    DataOptions,
    ModelOptions,
    ArchitectureOptions,
):
    """All sections."""


# The switches of mindspeed's features (--use-fused-rmsnorm and the like) are options as well.
if TYPE_CHECKING:

    class TrainOptions(StageOptions):
        """Everything that decides what a training run does."""

else:
    TrainOptions = create_model("TrainOptions", __base__=(StageOptions, registry().options_class))
    TrainOptions.__doc__ = "Everything that decides what a training run does."

OTHER_NAMES = {"--no-pad-to-seq-lengths": "variable_seq_lengths"}
"""Flags that were renamed upstream, under the name that is not the field's."""


def add_arguments(
    parser: argparse.ArgumentParser, sections: Sequence[type[Options]] = SECTIONS
) -> None:
    """Add every flag of training, in sections."""
    add_options(parser, TrainOptions, sections)
    for flag, field in OTHER_NAMES.items():
        parser.add_argument(
            flag,
            dest=field,
            action="store_true",
            default=argparse.SUPPRESS,
            help=f"The same as --{field.replace('_', '-')}.",
        )


def from_arguments(namespace: argparse.Namespace, *, is_pretraining: bool = False) -> TrainOptions:
    """Build the options of training and check them; pretraining has no stages."""
    options = read_options(namespace, TrainOptions)
    if is_pretraining and "stage" in options.model_fields_set:
        raise ConfigError(
            f"--stage {options.stage}: is for posttrain_gpt.py: use that, or drop it to pretrain"
        )
    check(options, "pretraining" if is_pretraining else options.stage)
    return options


def parse(argv: Sequence[str] | None = None) -> TrainOptions:
    """Read the options of a script's command line."""
    parser = argparse.ArgumentParser(description="Train a language model.", allow_abbrev=False)
    add_arguments(parser)
    suggest_flags(parser)
    return from_arguments(parser.parse_args(argv))


def check(options: TrainOptions, stage: str | None = None) -> None:
    """Raise ConfigError for what can never work, before anything is loaded."""
    stage = stage or options.stage
    if not options.data_path:
        raise ConfigError("--data-path is missing: give the --output-prefix of preprocess")
    check_run(options)
    check_preferences(options, stage)
    check_rollouts(options, stage, options.distributed_timeout_minutes)
    if options.log_completions and options.save is None:
        raise ConfigError(
            f"--log-completions {options.log_completions}: its file is in --save, which is missing"
        )
    if options.calculate_per_token_loss and stage not in TOKEN_STAGES:
        hint = ", and give --grpo-loss-type dapo for such a mean" if stage == "grpo" else ""
        raise ConfigError(
            "--calculate-per-token-loss: is for pretraining and --stage sft and prm, not "
            f"{stage}: drop it{hint}"
        )
    if options.load is None and not options.from_scratch:
        raise ConfigError(
            "--load is missing: give a model or a checkpoint, or --from-scratch for random weights"
        )
    check_precision(options.bf16, options.fp16)
    split_weights(options.data_path)
    start, end = split_parts(options.split)[1]
    if options.eval_interval and options.eval_iters and start == end:
        raise ConfigError(
            f"--eval-interval {options.eval_interval}: --split {options.split} leaves no data to "
            "evaluate on: give a share, such as --split 98,2,0, or drop --eval-interval"
        )
