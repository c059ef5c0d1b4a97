"""Flags of a run: those of the document, those it shares with the LLM suite, and old ones."""

from typing import Literal

from pydantic import Field

from mindspeed.config import Options
from mindspeed.training.options import (
    CheckpointOptions,
    LogOptions,
    OptimizerOptions,
    RunOptions,
    ScheduleOptions,
)
from mindspeed_mm.data.options import MOST_SAMPLES, MOST_WORKERS


class FileOptions(Options):
    """The files of a run; one YAML file may hold them all, as sections."""

    mm_model: str | None = None
    """JSON or YAML file of the model; it becomes args.mm.model."""
    mm_data: str | None = None
    """JSON or YAML file of the data; it becomes args.mm.data."""
    mm_tool: str | None = None
    """JSON or YAML file of the profiler; it becomes args.mm.tool."""
    fsdp2_config_path: str | None = None
    """YAML file with the sharding of the model."""
    use_torch_fsdp2: bool = False
    """Shard with FSDP2, as is always done here."""


class BatchOptions(Options):
    """How data becomes batches."""

    micro_batch_size: int = Field(default=1, le=MOST_SAMPLES)
    """Samples in one pass."""
    global_batch_size: int | None = None
    """Samples in one step over all ranks (default: one micro-batch a rank)."""
    seq_length: int | None = None
    """Longest sample, in tokens (default: that of the data file)."""
    num_workers: int | None = Field(default=None, le=MOST_WORKERS)
    """Processes that prepare batches (default: that of the data file)."""
    calculate_per_token_loss: bool = False
    """Mean loss over all tokens of a step; without it the mean over micro-batches."""


class ModelOptions(Options):
    """How the model is made."""

    init_model_with_meta_device: bool = False
    """Build the model without memory, shard it, and only then read each rank's part of it."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own, which begin as those of the embedding."""
    bf16: bool = False
    """Compute in bfloat16, reduce in float32: param_dtype and reduce_dtype, if not given."""


class ParallelOptions(Options):
    """How ranks share the work, beside sharding."""

    context_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each sequence (Ulysses)."""
    distributed_backend: str | None = None
    """A list that names cpu, as in npu:hccl,cpu:gloo, adds a backend for host memory, which
    offload_to_cpu needs; the device decides the rest."""
    distributed_timeout_minutes: int = 10
    """How long ranks wait for each other."""


class AcceptedOptions(Options):
    """Flags of existing scripts that change nothing here; each with the reason."""

    ckpt_format: Literal["torch_dcp"] = "torch_dcp"
    """Accepted: checkpoints are torch_dcp, which any number of ranks can load."""
    use_mcore_models: bool = False
    """Accepted: the model is the one that model_provider builds."""
    use_cpu_initialization: bool = False
    """Accepted: --init-model-with-meta-device needs less memory."""
    no_gradient_accumulation_fusion: bool = False
    """Accepted: FSDP2 has none."""
    optimizer_selection: Literal["fused_torch_adamw", "fused_adamw"] = "fused_torch_adamw"
    """Accepted: AdamW is fused where the device can."""
    context_parallel_algo: Literal["ulysses_cp_algo"] = "ulysses_cp_algo"
    """Accepted: Ulysses is the one there is."""
    attention_softmax_in_fp32: bool = False
    """Accepted: the model decides."""
    use_flash_attn: bool = False
    """Accepted: attn_implementation of the model decides."""
    no_masked_softmax_fusion: bool = False
    """Accepted: there is no such kernel to switch off."""
    no_load_rng: bool = False
    """Accepted: random numbers depend on seed, step and rank only."""
    no_save_rng: bool = False
    """Accepted: random numbers depend on seed, step and rank only."""
    exit_on_missing_checkpoint: bool = False
    """Accepted: a missing checkpoint is always an error."""
    log_throughput: bool = False
    """Accepted: tokens a second are logged; steps differ too much in size for one FLOPs number."""
    dataloader_type: Literal["external"] = "external"
    """Accepted: what the data provider returns is used."""
    tokenizer_type: str | None = None
    """Accepted: the processor of the model is used."""
    num_layers: int | None = None
    """Accepted: the model's own config decides."""
    hidden_size: int | None = None
    """Accepted: the model's own config decides."""
    ffn_hidden_size: int | None = None
    """Accepted: the model's own config decides."""
    num_attention_heads: int | None = None
    """Accepted: the model's own config decides."""
    num_query_groups: int | None = None
    """Accepted: the model's own config decides."""
    group_query_attention: bool = False
    """Accepted: the model's own config decides."""
    max_position_embeddings: int | None = None
    """Accepted: the model's own config decides."""
    vocab_size: int | None = None
    """Accepted: the model's own config decides."""
    make_vocab_size_divisible_by: int = 1
    """Accepted: the model's own config decides."""
    padded_vocab_size: int | None = None
    """Accepted: the model's own config decides."""
    position_embedding_type: str | None = None
    """Accepted: the model's own config decides."""
    rotary_base: float | None = None
    """Accepted: the model's own config decides."""
    normalization: str | None = None
    """Accepted: the model's own config decides."""
    norm_epsilon: float | None = None
    """Accepted: the model's own config decides."""
    swiglu: bool = False
    """Accepted: the model's own config decides."""
    disable_bias_linear: bool = False
    """Accepted: the model's own config decides."""
    attention_dropout: float = 0.0
    """Accepted: the model's own config decides."""
    hidden_dropout: float = 0.0
    """Accepted: the model's own config decides."""
    init_method_std: float = 0.02
    """Accepted: the model's own rules decide."""
    local_rank: int | None = None
    """Accepted for existing launchers: the environment decides."""


INSTEAD = {
    "fp16": "FSDP2 training has no loss scaling for float16: use --bf16, or param_dtype: bf16",
    "recompute_granularity": "Megatron's recompute does not reach this model: name the modules in "
    "recompute_modules of the FSDP2 file",
    "tensor_model_parallel_size": "FSDP2 shards by modules: use sharding_size of the FSDP2 file",
    "expert_model_parallel_size": "use expert_parallel_size of the FSDP2 file",
    "use_distributed_optimizer": "FSDP2 shards the optimizer's state already",
}
"""Flags of Megatron that cannot be served, and what to do instead."""
INSTEAD |= dict.fromkeys(
    ("recompute_method", "recompute_num_layers", "recompute_activations"),
    INSTEAD["recompute_granularity"],
)
INSTEAD["pipeline_model_parallel_size"] = INSTEAD["tensor_model_parallel_size"]
INSTEAD["sequence_parallel"] = "use --context-parallel-size"


class RefusedOptions(Options):
    """Flags of Megatron that mean nothing to FSDP2; given, they are refused with a way out."""

    fp16: bool = False
    """Refused: use bf16."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Refused: use recompute_modules of the FSDP2 file."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Refused: use recompute_modules of the FSDP2 file."""
    recompute_num_layers: int | None = None
    """Refused: use recompute_modules of the FSDP2 file."""
    recompute_activations: bool = False
    """Refused: use recompute_modules of the FSDP2 file."""
    tensor_model_parallel_size: int = 1
    """Refused above 1: use sharding_size of the FSDP2 file."""
    pipeline_model_parallel_size: int = 1
    """Refused above 1: use sharding_size of the FSDP2 file."""
    expert_model_parallel_size: int = 1
    """Refused above 1: use expert_parallel_size of the FSDP2 file."""
    sequence_parallel: bool = False
    """Refused: use --context-parallel-size."""
    use_distributed_optimizer: bool = False
    """Refused: FSDP2 shards the optimizer's state already."""


SECTIONS = (
    FileOptions,
    BatchOptions,
    ModelOptions,
    ParallelOptions,
    OptimizerOptions,
    ScheduleOptions,
    CheckpointOptions,
    LogOptions,
    AcceptedOptions,
    RefusedOptions,
)


class MmOptions(
    RefusedOptions,
    AcceptedOptions,
    RunOptions,
    ParallelOptions,
    ModelOptions,
    BatchOptions,
    FileOptions,
):
    """All flags of a run."""
