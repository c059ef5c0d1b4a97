"""Fused SwiGLU in dense, shared-expert and expert MLPs."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.patching import Patch


class FusedSwiglu(Feature):
    """Compute silu(gate) * up by one operator that keeps only its input for backward."""

    name = "fused_swiglu"
    title = "Fused SwiGLU"
    group = "Fusion"
    level = Level.AFFINITY
    enabled_by = "use_fused_swiglu"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switch."""

        use_fused_swiglu: bool | None = None
        """Use the fused SwiGLU operator in dense, shared-expert and expert MLPs. Default: on
        CUDA."""

    def check(self, options: Any, context: Context) -> None:
        """Megatron must be asked for SwiGLU, and for its fused path, which is the one wrapped."""
        if context.megatron is None:
            return
        flag = context.spelling.name_of("use_fused_swiglu")
        if not context.argument("swiglu", False):
            raise ConfigError(f"{flag} needs a SwiGLU MLP: add --swiglu or drop {flag}")
        if not context.argument("bias_swiglu_fusion", True):
            raise ConfigError(f"{flag} and --no-bias-swiglu-fusion contradict each other: drop one")

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the functions that the MLPs call."""
        yield Patch.wrap(
            "megatron.core.fusions.fused_bias_swiglu:bias_swiglu_impl",
            "mindspeed.ops.swiglu.megatron:wrap_bias_swiglu_impl",
            why="the MLP calls this function directly; no spec or argument selects another",
        )
        yield Patch.wrap(
            "megatron.core.fusions.fused_bias_swiglu:weighted_bias_swiglu_impl",
            "mindspeed.ops.swiglu.megatron:wrap_weighted_bias_swiglu_impl",
            why="experts call this one, with a factor for each token",
        )
        yield Patch.wrap(
            "megatron.core.transformer.mlp:MLP.__init__",
            "mindspeed.te.fused_mlp:wrap_mlp_init",
            why="an MLP of any spec gets the fused path when it is built",
        )
        yield Patch.wrap(
            "megatron.core.transformer.mlp:MLP.forward",
            "mindspeed.te.fused_mlp:wrap_mlp_forward",
            why="fc2 recomputes the activation of fc1, and only the MLP has both, in any spec",
        )
