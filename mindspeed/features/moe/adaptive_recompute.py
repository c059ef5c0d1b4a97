"""Layers of experts that are recomputed while their load is uneven."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.features.moe.experts import check_experts
from mindspeed.patching import Patch


class MoeAdaptiveRecompute(Feature):
    """Spend memory on activations of experts only where the load is even."""

    name = "moe_adaptive_recompute"
    title = "Load-aware recompute of experts"
    group = "MoE"
    level = Level.ALGORITHM
    enabled_by = "moe_adaptive_recompute_activation"

    class Options(config.Options):
        """The switch and the limit."""

        moe_adaptive_recompute_activation: bool = False
        """Recompute a layer of experts in backward if one of its experts was overloaded in the
        previous forward pass, and in the first pass."""
        moe_adaptive_recompute_activation_scale: Annotated[
            float, Field(gt=0, allow_inf_nan=False)
        ] = 2.0
        """Overloaded is an expert with more than this many times its even share of the tokens."""

    def check(self, options: Any, context: Context) -> None:
        """Nothing else recomputes the layer."""
        flag = context.name_of(options, "moe_adaptive_recompute_activation")
        check_experts(flag, context)
        granularity = context.argument("recompute_granularity")
        if granularity == "full":
            raise ConfigError(
                f"{flag} has no effect under --recompute-granularity full: drop one of them"
            )
        if context.argument("overlap_moe_expert_parallel_comm", False):
            raise ConfigError(
                f"{flag}: --overlap-moe-expert-parallel-comm runs the parts of a layer apart, so "
                "that none is recomputed as a whole: drop one of them"
            )
        if granularity == "selective" and "moe" in context.argument("recompute_modules", ()):
            raise ConfigError(f"{flag} and --recompute-modules moe exclude each other: drop one")

    def patches(self, options: Any) -> Iterator[Patch]:
        """Decide in the layer itself."""
        layer = "megatron.core.transformer.moe.moe_layer:MoELayer"
        package = "mindspeed.moe.adaptive_recompute"
        yield Patch.wrap(
            f"{layer}.__init__",
            bind(f"{package}:wrap_init", options.moe_adaptive_recompute_activation_scale),
            why="the layer makes its router itself, and the router alone knows the load",
        )
        yield Patch.wrap(
            f"{layer}.forward",
            f"{package}:wrap_forward",
            why="Megatron decides about recompute once, when it builds the layer",
        )
