"""Balanced routing that is the same in every run, for benchmarks."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.features.base import Context, Feature, Level
from mindspeed.features.moe.experts import check_experts
from mindspeed.patching import Patch


class FixRouter(Feature):
    """Send tokens to experts in turn, whatever the router says."""

    name = "fix_router"
    title = "Fixed routing"
    group = "MoE"
    level = Level.COMPAT
    enabled_by = "fix_router"

    class Options(config.Options):
        """The switch."""

        fix_router: bool = False
        """Send tokens to experts in turn instead of by the router's scores, so that every run of a
        benchmark has the same even load. Not for training."""

    def check(self, options: Any, context: Context) -> None:
        """There are routers."""
        check_experts(context.name_of(options, "fix_router"), context)

    def patches(self, options: Any) -> Iterator[Patch]:
        """Replace the scores."""
        yield Patch.wrap(
            "megatron.core.transformer.moe.router:TopKRouter.routing",
            "mindspeed.moe.fixed_routing:wrap_routing",
            why="the router computes and uses its scores itself",
        )
