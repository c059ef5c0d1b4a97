"""Experts that gather tokens in their GEMMs and keep tokens and pre-activations only."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.features.moe.experts import check_experts
from mindspeed.patching import Patch

REFUSED = {
    "add_bias_linear": "experts without a bias: add --disable-bias-linear",
    "fp8": "GEMMs of 16 bits or more: drop --fp8-format",
    "fp4": "GEMMs of 16 bits or more: drop --fp4-format",
    "moe_use_legacy_grouped_gemm": "Megatron's TEGroupedMLP: drop --moe-use-legacy-grouped-gemm",
    "moe_apply_probs_on_input": "weights on outputs: drop --moe-apply-probs-on-input",
    "use_te_activation_func": "its own activation: drop --use-te-activation-func",
    "activation_func_clamp_value": "plain SwiGLU: drop --activation-func-clamp-value",
    "glu_linear_offset": "plain SwiGLU: drop --glu-linear-offset",
    "quick_geglu": "plain SwiGLU: use --swiglu for --quick-geglu",
}
"""Megatron's arguments whose experts would not take the path, and what it needs instead."""
OFFLOADED = {"expert_fc1", "moe_act"}


class MoeFusedExperts(Feature):
    """Run dispatch on one rank, both grouped GEMMs, SwiGLU and combine as one path."""

    name = "moe_fused_experts"
    title = "Fused experts"
    group = "MoE"
    level = Level.ALGORITHM
    enabled_by = "moe_fused_experts"
    default_devices = ("cuda",)
    conflicts = {"moe_bmm_mc2": "its GEMMs and collectives are one operator"}

    class Options(config.Options):
        """The switch."""

        moe_fused_experts: bool | None = None
        """Gather tokens in the load of the experts' first grouped GEMM, apply SwiGLU in its
        epilogue, and keep the tokens and the pre-activation only. Needs --moe-grouped-gemm.
        Default: on CUDA."""

    def check(self, options: Any, context: Context) -> None:
        """There must be grouped experts, of the only kind that is fused."""
        if context.megatron is None:
            return
        flag = context.name_of(options, "moe_fused_experts")
        check_experts(flag, context)
        if not context.argument("moe_grouped_gemm", False):
            raise ConfigError(f"{flag} needs --moe-grouped-gemm: add that or drop {flag}")
        for name, need in REFUSED.items():
            if context.argument(name):
                raise ConfigError(f"{flag} needs {need}, or drop {flag}")
        if not context.argument("swiglu", True):
            raise ConfigError(f"{flag} needs SwiGLU experts: add --swiglu or drop {flag}")
        if offloaded := OFFLOADED.intersection(context.argument("offload_modules", ())):
            names = " ".join(sorted(offloaded))
            raise ConfigError(f"{flag} and --offload-modules {names} exclude each other: drop one")

    def patches(self, options: Any) -> Iterator[Patch]:
        """Choose when experts and layers are built."""
        experts = "megatron.core.transformer.moe.experts:TEGroupedMLP"
        package = "mindspeed.te.fused_experts"
        yield Patch.wrap(
            f"{experts}.__init__",
            bind(f"{package}:wrap_experts_init", bool(options.moe_fused_experts)),
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
