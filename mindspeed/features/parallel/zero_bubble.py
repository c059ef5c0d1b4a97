"""Weight gradients in the bubble of the pipeline."""

from collections.abc import Iterator
from typing import Any, Literal

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.patching import Patch

PACKAGE = "mindspeed.parallel.pipeline.zero_bubble"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
MESSAGES = "megatron.core.pipeline_parallel.p2p_communication"
# Megatron's arguments that compute or reduce weight gradients at times of their own.
OTHERS = (
    "defer_embedding_wgrad_compute",
    "delay_wgrad_compute",
    "overlap_moe_expert_parallel_comm",
    "use_megatron_fsdp",
    "use_custom_fsdp",
    "use_torch_fsdp2",
)


class ZeroBubble(Feature):
    """Delay weight gradients until a pipeline stage would wait."""

    name = "zero_bubble"
    title = "Zero bubble"
    group = "Parallel"
    level = Level.COMPAT
    enabled_by = "schedules_method"
    conflicts = {"virtual_pipeline": "ZB-H1 has one stage a rank"}

    class Options(config.Options):
        """The schedule."""

        schedules_method: Literal["zb-h1"] | None = None
        """How pipeline stages take turns: zb-h1 moves weight gradients into the bubble, which
        falls to a third. Default: Megatron's 1F1B."""

    def check(self, options: Any, context: Context) -> None:
        """There is a bubble, and nothing else decides when weight gradients are computed."""
        if context.megatron is None:
            return
        given = context.spelling.with_value("schedules_method", options.schedules_method)
        if context.argument("pipeline_model_parallel_size", 1) < 2:
            raise ConfigError(f"{given} needs --pipeline-model-parallel-size 2 or more, not 1")
        for other in OTHERS:
            if context.argument(other, False):
                name = config.flag_name(other)
                raise ConfigError(
                    f"{given} and {name} exclude each other, both move weight gradients: drop one"
                )
        instances = context.argument("num_distributed_optimizer_instances", 1)
        if instances > 1:
            raise ConfigError(
                f"{given} needs --num-distributed-optimizer-instances 1, not {instances}: change "
                "one of them"
            )

    def patches(self, options: Any) -> Iterator[Patch]:
        """Put a queue around 1F1B, and W behind its messages."""
        yield Patch.wrap(
            f"{SCHEDULES}:get_forward_backward_func",
            f"{PACKAGE}:wrap_get_forward_backward_func",
            why="trainers ask here for the schedule",
        )
        yield Patch.wrap(
            f"{SCHEDULES}:backward_step",
            f"{PACKAGE}:wrap_backward_step",
            why="the weight gradients of a micro-batch belong together",
        )
        for function in ("_p2p_ops", "_batched_p2p_ops"):
            yield Patch.wrap(
                f"{MESSAGES}:{function}",
                f"{PACKAGE}:wrap_p2p_ops",
                why="the only place between posting a message and waiting for it",
            )
        yield Patch.wrap(
            "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
            f"{PACKAGE}:wrap_linear",
            why="the linear layers of local specs cannot delay their weight gradients",
        )
