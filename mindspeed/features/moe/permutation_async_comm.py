"""Token dispatchers whose collectives run beside the computation."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.features.moe.experts import check_experts
from mindspeed.patching import Patch

SERVED = ("allgather", "alltoall")
# Arguments of Megatron that need its own alltoall dispatcher, by the versions' names.
FOREIGN = (
    "overlap_moe_expert_parallel_comm",
    "moe_router_padding_for_fp8",
    "moe_router_padding_for_quantization",
)


class MoePermutationAsyncComm(Feature):
    """Number and copy rows, and run shared experts, while tokens travel."""

    name = "moe_permutation_async_comm"
    title = "Asynchronous token dispatch"
    group = "MoE"
    level = Level.ALGORITHM
    enabled_by = "moe_permutation_async_comm"

    class Options(config.Options):
        """The switch."""

        moe_permutation_async_comm: bool = False
        """Dispatch tokens to experts by asynchronous collectives: row numbers are built and shared
        experts run while tokens travel. For the allgather and alltoall dispatchers."""

    def check(self, options: Any, context: Context) -> None:
        """Megatron builds one of the two dispatchers, and nothing takes it apart."""
        if context.megatron is None:
            return
        flag = context.name_of(options, "moe_permutation_async_comm")
        check_experts(flag, context)
        dispatcher = context.argument("moe_token_dispatcher_type", "alltoall")
        if dispatcher not in SERVED:
            raise ConfigError(
                f"{flag} serves --moe-token-dispatcher-type {' and '.join(SERVED)}, not "
                f"{dispatcher}: choose one of them or drop {flag}"
            )
        for argument in FOREIGN:
            if context.argument(argument, False):
                other = config.flag_name(argument)
                raise ConfigError(f"{flag} and {other} cannot be used together: drop one")

    def patches(self, options: Any) -> Iterator[Patch]:
        """Replace the two classes."""
        for theirs, ours in (
            ("MoEAllGatherTokenDispatcher", "allgather_dispatcher:AllGatherDispatcher"),
            ("MoEAlltoAllTokenDispatcher", "alltoall_dispatcher:AllToAllDispatcher"),
        ):
            yield Patch.replace(
                f"megatron.core.transformer.moe.token_dispatcher:{theirs}",
                f"mindspeed.moe.{ours}",
                why="MoELayer names the classes itself; no spec or argument chooses others",
            )
