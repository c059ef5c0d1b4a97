"""The scores of routers in float32 on tensor cores, and the sums of their z-loss."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.features.base import Context, Feature, Level
from mindspeed.features.moe.experts import check_experts
from mindspeed.patching import Patch


class MoeRouterScores(Feature):
    """Multiply 16-bit tokens and router weights into float32, and sum for the z-loss at once."""

    name = "moe_router_scores"
    title = "Router scores"
    group = "MoE"
    level = Level.AFFINITY
    enabled_by = "moe_router_scores"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switch."""

        moe_router_scores: bool | None = None
        """Compute float32 scores of routers from bfloat16 tokens and weights on tensor cores, and
        the logarithms of --moe-z-loss-coeff by one kernel. Default: on CUDA."""

    def check(self, options: Any, context: Context) -> None:
        """There are routers."""
        check_experts(context.name_of(options, "moe_router_scores"), context)

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the router's GEMM and its z-loss."""
        yield Patch.wrap(
            "megatron.core.transformer.moe.router:Router.gating",
            "mindspeed.ops.router_linear.megatron:wrap_gating",
            why="routers convert both factors and multiply them by themselves",
        )
        yield Patch.wrap(
            "megatron.core.transformer.moe.moe_utils:z_loss_func",
            "mindspeed.ops.row_logsumexp.megatron:wrap_z_loss",
            why="routers call it by name; nothing selects another",
        )
