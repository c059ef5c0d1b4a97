"""The choice of experts by one kernel, under Megatron's own switch."""

from typing import Any

from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level


class MoeRouterFusion(Feature):
    """Scores, groups and choice of a router as one kernel each way, in float32."""

    name = "moe_router_fusion"
    title = "Fused router"
    group = "MoE"
    level = Level.COMPAT
    megatron_flags = ("--moe-router-fusion",)

    def is_on(self, options: Any, context: Context) -> bool:
        """Read Megatron's own argument; its router calls transformer_engine's functions then."""
        return bool(context.argument("moe_router_fusion"))

    def check(self, options: Any, context: Context) -> None:
        """Refuse what Megatron would ignore without a word."""
        if context.argument("moe_enable_routing_replay"):
            raise ConfigError(
                "--moe-router-fusion does not replay the choices of --moe-enable-routing-replay: "
                "drop one"
            )
