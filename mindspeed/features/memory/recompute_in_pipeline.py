"""Recompute in a pipeline that does not wait for the gradient."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.features.parallel.zero_bubble import MESSAGES, SCHEDULES
from mindspeed.patching import Patch

PACKAGE = "mindspeed.parallel.pipeline.recompute_ahead"


class _RecomputeAhead(Feature):
    """What both ways share: closures of checkpoints that run before a gradient is waited for."""

    level = Level.COMPAT
    group = "Memory"
    only_excess: bool

    def check(self, options: Any, context: Context) -> None:
        """There are messages to wait for, and the checkpoints are Megatron's plain ones."""
        if context.megatron is None:
            return
        flag = context.name_of(options, str(self.enabled_by))
        if context.argument("pipeline_model_parallel_size", 1) < 2:
            raise ConfigError(f"{flag} needs --pipeline-model-parallel-size 2 or more, not 1")
        for other in (
            "distribute_saved_activations",
            "overlap_moe_expert_parallel_comm",
            "use_ring_exchange_p2p",
            "cpu_offloading",
            "fp8",
        ):
            if context.argument(other):
                name = config.flag_name(other)
                raise ConfigError(f"{flag} and {name} exclude each other: drop one")

    def patches(self, options: Any) -> Iterator[Patch]:
        """Keep the closures of checkpoints, and run them behind messages."""
        yield Patch.wrap(
            f"{SCHEDULES}:get_forward_backward_func",
            bind(f"{PACKAGE}:wrap_get_forward_backward_func", self.only_excess),
            why="trainers ask here for the schedule",
        )
        yield Patch.wrap(
            f"{SCHEDULES}:backward_step",
            f"{PACKAGE}:wrap_backward_step",
            why="which chunk goes backward next follows from how many have",
        )
        yield Patch.wrap(
            "megatron.core.tensor_parallel.random:checkpoint",
            f"{PACKAGE}:wrap_checkpoint",
            why="its function recomputes in backward only",
        )
        for function in ("_p2p_ops", "_batched_p2p_ops"):
            yield Patch.wrap(
                f"{MESSAGES}:{function}",
                f"{PACKAGE}:wrap_p2p_ops",
                why="the only place between posting a message and waiting for it",
            )


class RecomputeInAdvance(_RecomputeAhead):
    """Recompute the next chunk before its gradient is there."""

    name = "recompute_in_advance"
    title = "Recompute in advance of backward"
    enabled_by = "recompute_in_advance"
    only_excess = False
    conflicts = {
        "zero_bubble": "both use the time before a message is waited for",
        "swap_layer_input": "a layer that is recomputed ahead keeps its input on the device",
    }

    class Options(config.Options):
        """The switch."""

        recompute_in_advance: bool = False
        """In a pipeline with full block recompute, recompute the next chunk while its gradient is
        on its way."""

    def check(self, options: Any, context: Context) -> None:
        """Whole layers are recomputed, one by one."""
        super().check(options, context)
        if context.megatron is None:
            return
        flag = context.name_of(options, "recompute_in_advance")
        method = context.argument("recompute_method")
        if context.argument("recompute_granularity") != "full" or method != "block":
            raise ConfigError(
                f"{flag} needs --recompute-granularity full --recompute-method block: add them or "
                f"drop {flag}"
            )


class RecomputeInBubble(_RecomputeAhead):
    """Recompute only forward passes that are more than fill the pipeline."""

    name = "recompute_in_bubble"
    title = "Recompute in the bubble"
    enabled_by = "recompute_in_bubble"
    only_excess = True
    conflicts = {
        "recompute_in_advance": "that one recomputes everything",
        "recompute": "it decides which layers are recomputed",
        "swap_attention": "it decides for each layer where activations are kept",
        "zero_bubble": "it needs virtual stages",
    }

    class Options(config.Options):
        """The switch."""

        recompute_in_bubble: bool = False
        """In a virtual pipeline without recompute, let at most PP x VPP forward passes, over all
        chunks of a rank, keep their activations and recompute the others before their gradient is
        waited for."""

    def check(self, options: Any, context: Context) -> None:
        """Only virtual stages run further ahead than fills the pipeline."""
        super().check(options, context)
        if context.megatron is None:
            return
        flag = context.name_of(options, "recompute_in_bubble")
        names = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
        if not any(map(context.argument, names)):
            raise ConfigError(
                f"{flag} needs --num-layers-per-virtual-pipeline-stage: without virtual stages no "
                "forward pass is more than fills the pipeline"
            )
