"""The scores of routers in float32, computed on tensor cores."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.features.base import Context, Feature, Level
from mindspeed.features.moe.experts import check_experts
from mindspeed.patching import Patch


class MoeRouterLinear(Feature):
    """Multiply tokens and router weights of 16 bits into float32 without converting them."""

    name = "moe_router_linear"
    title = "Router GEMM"
    group = "MoE"
    level = Level.AFFINITY
    enabled_by = "moe_router_linear"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switch."""

        moe_router_linear: bool | None = None
        """Compute float32 scores of routers from bfloat16 tokens and weights on tensor cores.
        Default: on CUDA."""

    def check(self, options: Any, context: Context) -> None:
        """There are routers."""
        check_experts(context.name_of(options, "moe_router_linear"), context)

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the router's GEMM."""
        yield Patch.wrap(
            "megatron.core.transformer.moe.router:Router.gating",
            "mindspeed.ops.router_linear.megatron:wrap_gating",
            why="routers convert both factors and multiply them by themselves",
        )
