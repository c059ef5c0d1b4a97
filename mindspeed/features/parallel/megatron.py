"""Megatron's own kinds of parallelism: no patches, checked before any rank starts."""

import math
from typing import Any

from mindspeed.config import ConfigError, check_layout, one_of
from mindspeed.features.base import Context, MegatronFeature

# With one of these, stages need not hold equal numbers of layers.
UNEVEN_STAGES = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "standalone_embedding_stage",
    "encoder_pipeline_model_parallel_size",
)


class DataParallel(MegatronFeature):
    """Ranks that hold the same weights and share the batch."""

    name = "data_parallel"
    title = "Data parallel"
    group = "Parallel"
    megatron_flags = ("--micro-batch-size", "--global-batch-size")

    def is_on(self, options: Any, context: Context) -> bool:
        """Ranks beyond one model copy are data-parallel."""
        return bool(context.argument("world_size", 1) > _ranks_per_copy(context))

    def check(self, options: Any, context: Context) -> None:
        """The ranks make whole copies of the model, and the batch divides over them."""
        check_layout(world_size=context.argument("world_size"), **_sizes(context))
        copies = context.argument("world_size") // _ranks_per_copy(context)
        batch = context.argument("global_batch_size")
        micro = context.argument("micro_batch_size", 1)
        step = micro * copies
        if batch and batch % step and not context.argument("decrease_batch_size_if_needed"):
            raise ConfigError(
                f"--global-batch-size {batch} is not a multiple of {step} (--micro-batch-size "
                f"{micro} x {copies} data-parallel ranks): use {step} or a multiple"
            )


class TensorParallel(MegatronFeature):
    """Ranks that share each layer's matrices."""

    name = "tensor_parallel"
    title = "Tensor parallel"
    group = "Parallel"
    megatron_flags = ("--tensor-model-parallel-size",)

    def is_on(self, options: Any, context: Context) -> bool:
        """More than one rank shares a layer."""
        return bool(context.argument("tensor_model_parallel_size", 1) > 1)

    def check(self, options: Any, context: Context) -> None:
        """Every rank gets whole attention heads."""
        size = context.argument("tensor_model_parallel_size")
        heads = context.argument("num_attention_heads")
        groups = context.argument("num_query_groups")
        check_layout(
            world_size=size,
            tensor_model_parallel_size=size,
            num_attention_heads=heads,
            num_query_groups=groups if context.argument("group_query_attention") else None,
        )


class SequenceParallel(MegatronFeature):
    """Tensor-parallel ranks that also share norm and dropout activations, by sequence position."""

    name = "sequence_parallel"
    title = "Sequence parallel"
    group = "Parallel"
    requires = ("tensor_parallel",)
    megatron_flags = ("--sequence-parallel",)

    def is_on(self, options: Any, context: Context) -> bool:
        """Megatron ignores the flag on one tensor-parallel rank, with a warning."""
        is_split = context.argument("tensor_model_parallel_size", 1) > 1
        return bool(context.argument("sequence_parallel") and is_split)


class PipelineParallel(MegatronFeature):
    """Ranks that hold consecutive layers and pass micro-batches on."""

    name = "pipeline_parallel"
    title = "Pipeline parallel"
    group = "Parallel"
    megatron_flags = ("--pipeline-model-parallel-size",)

    def is_on(self, options: Any, context: Context) -> bool:
        """The model has more than one stage."""
        return bool(context.argument("pipeline_model_parallel_size", 1) > 1)

    def check(self, options: Any, context: Context) -> None:
        """Stages are equal unless Megatron is told how they differ."""
        size, layers = context.argument("pipeline_model_parallel_size"), _even_layers(context)
        check_layout(world_size=size, pipeline_model_parallel_size=size, num_layers=layers)


class VirtualPipeline(MegatronFeature):
    """Pipeline ranks that hold several smaller stages each, which shortens the bubble."""

    name = "virtual_pipeline"
    title = "Virtual pipeline"
    group = "Parallel"
    requires = ("pipeline_parallel",)
    megatron_flags = ("--num-layers-per-virtual-pipeline-stage",)

    def check(self, options: Any, context: Context) -> None:
        """The virtual stages of a rank are equal."""
        layers, ranks = _even_layers(context), context.argument("pipeline_model_parallel_size")
        size = context.argument("num_layers_per_virtual_pipeline_stage")
        if layers is not None and layers % (ranks * size):
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage {size} does not divide the "
                f"{layers // ranks} layers of a pipeline rank (--num-layers {layers} / "
                f"--pipeline-model-parallel-size {ranks}): use {one_of(_divisors(layers // ranks))}"
            )


def _sizes(context: Context) -> dict[str, int]:
    """Return the sizes whose product is the number of ranks of one model copy."""
    kinds = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return {kind: int(context.argument(kind, 1)) for kind in kinds}


def _ranks_per_copy(context: Context) -> int:
    return math.prod(_sizes(context).values())


def _even_layers(context: Context) -> int | None:
    """Return the number of layers where all stages must hold equally many, else None."""
    if any(context.argument(name) for name in UNEVEN_STAGES):
        return None
    layers: int | None = context.argument("num_layers")
    return layers


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
