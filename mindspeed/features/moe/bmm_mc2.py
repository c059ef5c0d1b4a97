"""Experts' GEMMs as one operator with the collectives around them."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.features.moe.experts import check_experts
from mindspeed.patching import Patch

NEEDED = {
    "moe_grouped_gemm": "--moe-grouped-gemm",
    "moe_pad_expert_input_to_capacity": "--moe-pad-expert-input-to-capacity",
}
EXCLUDED = {
    "moe_shared_expert_overlap": "--moe-shared-expert-overlap",
    "moe_apply_probs_on_input": "--moe-apply-probs-on-input",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
}
"""Megatron's arguments that change what the experts' linears get or compute with."""


class MoeBmmMc2(Feature):
    """Dispatch with the first GEMM and the second GEMM with combine, for drop-and-pad."""

    name = "moe_bmm_mc2"
    title = "MoE BMM fusion"
    group = "MoE"
    level = Level.ALGORITHM
    enabled_by = "moe_bmm_mc2"
    conflicts = {
        "moe_permutation_async_comm": "the collectives that it starts early are in the operators"
    }

    class Options(config.Options):
        """The switch."""

        moe_bmm_mc2: bool = False
        """Run the collectives around the experts' GEMMs and the GEMMs as one operator each. For
        the alltoall dispatcher with experts padded to their capacity, TP and EP above 1."""

    def check(self, options: Any, context: Context) -> None:
        """Every expert gets as many rows from every rank."""
        if context.megatron is None:
            return
        flag = context.name_of(options, "moe_bmm_mc2")
        check_experts(flag, context)
        for argument, needed in NEEDED.items():
            if not context.argument(argument, False):
                raise ConfigError(f"{flag} needs {needed}: add that or drop {flag}")
        dispatcher = context.argument("moe_token_dispatcher_type", "alltoall")
        if dispatcher != "alltoall":
            raise ConfigError(
                f"{flag} needs --moe-token-dispatcher-type alltoall, not {dispatcher}"
            )
        for argument, other in EXCLUDED.items():
            if context.argument(argument, False):
                raise ConfigError(f"{flag} and {other} exclude each other: drop one")
        tp = context.argument("tensor_model_parallel_size", 1)
        etp = context.argument("expert_tensor_parallel_size", tp)
        if min(etp, context.argument("expert_model_parallel_size", 1)) < 2:
            raise ConfigError(
                f"{flag} needs experts that are split over tensor- and over expert-parallel "
                "ranks: choose sizes above 1 for both or drop it"
            )

    def patches(self, options: Any) -> Iterator[Patch]:
        """Replace the dispatcher and both grouped linears."""
        transformer_engine = "megatron.core.extensions.transformer_engine"
        for target, ours, why in (
            (
                "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher",
                "bmm_dispatcher:BmmDispatcher",
                "MoELayer names the class itself; no spec or argument chooses another",
            ),
            (
                f"{transformer_engine}:TEColumnParallelGroupedLinear",
                "bmm_linears:ColumnBmm",
                "specs of all versions name it, each in its own place",
            ),
            (
                f"{transformer_engine}:TERowParallelGroupedLinear",
                "bmm_linears:RowBmm",
                "specs of all versions name it, each in its own place",
            ),
        ):
            yield Patch.replace(target, f"mindspeed.moe.{ours}", why=why)
