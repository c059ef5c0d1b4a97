"""What pipeline stages hand to each other: lengths that vary, and several tensors."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.compat import megatron
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.features.parallel.zero_bubble import MESSAGES, SCHEDULES
from mindspeed.patching import Patch

PACKAGE = "mindspeed.parallel.pipeline.stage_tensors"


class DynamicShapes(Feature):
    """Micro-batches of different lengths in a pipeline; Megatron does it all."""

    name = "dynamic_shapes"
    title = "PP dynamic shapes"
    group = "Parallel"
    level = Level.COMPAT
    enabled_by = "variable_seq_lengths"

    class Options(config.Options):
        """The switch, under Megatron's name of it."""

        variable_seq_lengths: bool = False
        """Micro-batches may differ in length: pipeline stages tell each other the shape of what
        comes."""

    def is_on(self, options: Any, context: Context) -> bool:
        """Shapes are exchanged between stages; a single stage sends nothing."""
        is_pipeline = context.argument("pipeline_model_parallel_size", 1) > 1
        return options.variable_seq_lengths and (context.megatron is None or is_pipeline)

    def check(self, options: Any, context: Context) -> None:
        """Dispatchers that gather tokens need equal lengths."""
        dispatcher = context.argument("moe_token_dispatcher_type")
        if context.argument("num_experts") and dispatcher in ("allgather", "alltoall_seq"):
            flag = context.spelling.name_of("variable_seq_lengths")
            raise ConfigError(
                f"{flag} needs --moe-token-dispatcher-type alltoall, not {dispatcher}: change one "
                "of them"
            )


class StageTensors(Feature):
    """Several tensors between pipeline stages, each with its own shape and dtype."""

    name = "stage_tensors"
    title = "PP multi-parameter"
    group = "Parallel"
    level = Level.COMPAT
    enabled_by = "use_multiparameter_pipeline_model_parallel"

    class Options(config.Options):
        """The switch."""

        use_multiparameter_pipeline_model_parallel: bool = False
        """Let pipeline stages hand on all tensors that the output_specs() of their modules declare,
        each with its own shape and dtype."""

    def check(self, options: Any, context: Context) -> None:
        """There are stages, and the schedule is one whose messages are known here."""
        if context.megatron is None:
            return
        flag = context.name_of(options, "use_multiparameter_pipeline_model_parallel")
        if context.argument("pipeline_model_parallel_size", 1) < 2:
            raise ConfigError(f"{flag} needs --pipeline-model-parallel-size 2 or more, not 1")
        for other in ("overlap_moe_expert_parallel_comm", "use_ring_exchange_p2p"):
            if context.argument(other, False):
                raise ConfigError(
                    f"{flag} and {config.flag_name(other)} exclude each other: drop one"
                )

    def patches(self, options: Any) -> Iterator[Patch]:
        """Look into tuples of tensors wherever the schedules take them for one tensor."""
        yield Patch.wrap(
            f"{SCHEDULES}:get_forward_backward_func",
            f"{PACKAGE}:wrap_get_forward_backward_func",
            why="the schedules know the model, their messages do not",
        )
        is_object = megatron.version() >= megatron.Version("0.14")
        owner, factory = (
            (f"{MESSAGES}:P2PCommunicator._communicate", "wrap_communicator_communicate")
            if is_object
            else (f"{MESSAGES}:_communicate", "wrap_communicate")
        )
        yield Patch.wrap(
            owner, f"{PACKAGE}:{factory}", why="it sends one tensor of one dtype for all stages"
        )
        yield Patch.wrap(
            f"{SCHEDULES}:backward_step",
            f"{PACKAGE}:wrap_backward_step",
            why="it goes backward from the first output only",
        )
        yield Patch.wrap(
            f"{SCHEDULES}:forward_step",
            f"{PACKAGE}:wrap_forward_step",
            why="it returns what is freed, which the graph of the stage may have saved",
        )
        yield Patch.wrap(
            f"{SCHEDULES}:deallocate_output_tensor",
            f"{PACKAGE}:wrap_deallocate_output_tensor",
            why="it frees one tensor",
        )
