"""Experts that gather tokens in their GEMMs and keep tokens and pre-activations only."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.features.moe.experts import check_experts
from mindspeed.patching import Patch


class MoeFusedExperts(Feature):
    """Run dispatch on one rank, both grouped GEMMs, SwiGLU and combine as one path."""

    name = "moe_fused_experts"
    title = "Fused experts"
    group = "MoE"
    level = Level.ALGORITHM
    enabled_by = "moe_fused_experts"
    default_devices = ()  # ("cuda",) makes it the default there
    conflicts = {"moe_bmm_mc2": "its GEMMs and collectives are one operator"}

    class Options(config.Options):
        """The switch."""

        moe_fused_experts: bool | None = None
        """Gather tokens in the load of the experts' first grouped GEMM, apply SwiGLU in its
        epilogue, and keep the tokens and the pre-activation only. Needs --moe-grouped-gemm."""

    def check(self, options: Any, context: Context) -> None:
        """There must be grouped experts."""
        if context.megatron is None:
            return
        flag = context.name_of(options, "moe_fused_experts")
        check_experts(flag, context)
        if not context.argument("moe_grouped_gemm", False):
            raise ConfigError(f"{flag} needs --moe-grouped-gemm: add that or drop {flag}")

    def patches(self, options: Any) -> Iterator[Patch]:
        """Choose when experts and layers are built."""
        experts = "megatron.core.transformer.moe.experts:TEGroupedMLP"
        package = "mindspeed.te.fused_experts"
        yield Patch.wrap(
            f"{experts}.__init__",
            f"{package}:wrap_experts_init",
            why="chosen when experts are built; a spec of each version names them its own way",
        )
        yield Patch.wrap(
            f"{experts}.forward",
            f"{package}:wrap_experts_forward",
            why="it runs the linears one after the other and reads the counts on the host",
        )
        yield Patch.wrap(
            "megatron.core.transformer.moe.moe_layer:MoELayer.__init__",
            "mindspeed.moe.local_dispatcher:wrap_layer_init",
            why="the layer names its dispatchers itself; no spec or argument chooses others",
        )
