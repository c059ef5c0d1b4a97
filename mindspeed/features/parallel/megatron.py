"""Megatron's own kinds of parallelism: no patches, checked before any rank starts."""

import math
from typing import Any

from mindspeed.distributed.parallel_dims import (
    ParallelDims,
    check_model,
    divide_batch,
    virtual_stages,
)
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
        dims = ParallelDims(world=context.argument("world_size"), **_sizes(context))
        batch = context.argument("global_batch_size")
        if batch and not context.argument("decrease_batch_size_if_needed"):
            divide_batch(batch, context.argument("micro_batch_size", 1), dims.dp)


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
        is_split = context.argument("group_query_attention") and groups is not None
        # Megatron copies key and value heads to several ranks where there are fewer than ranks;
        # sizes that divide both always work, and are what an error about query heads names.
        is_shared = is_split and (groups > size or (heads and heads % size))
        check_model(
            world=context.argument("world_size", 1),
            **_sizes(context),
            num_attention_heads=heads,
            num_query_groups=groups if is_shared else None,
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
        """Stages are equal unless Megatron's arguments describe how they differ."""
        world = context.argument("world_size", 1)
        check_model(world=world, **_sizes(context), num_layers=_even_layers(context))


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
        if layers is not None:
            virtual_stages(layers, ranks, size)


def _sizes(context: Context) -> dict[str, int]:
    """Return the sizes that multiply to the number of ranks of one model copy."""
    kinds = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context"}
    return {dim: int(context.argument(f"{kind}_parallel_size", 1)) for dim, kind in kinds.items()}


def _ranks_per_copy(context: Context) -> int:
    return math.prod(_sizes(context).values())


def _even_layers(context: Context) -> int | None:
    """Return the number of layers where all stages must hold equally many, else None."""
    if any(context.argument(name) for name in UNEVEN_STAGES):
        return None
    layers: int | None = context.argument("num_layers")
    return layers
