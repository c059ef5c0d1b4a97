"""Experts as grouped GEMMs, and their weight gradients added to float32 main_grad."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.patching import Patch, is_installed


class MoeGroupedGemm(Feature):
    """Megatron's own switch; both kinds of grouped experts reach the operator by themselves."""

    name = "moe_grouped_gemm"
    title = "Grouped GEMM"
    group = "MoE"
    level = Level.COMPAT
    megatron_flags = ("--moe-grouped-gemm",)

    def is_on(self, options: Any, context: Context) -> bool:
        """Read Megatron's own argument."""
        return bool(context.argument("moe_grouped_gemm"))


class MoeWeightGradientFusion(Feature):
    """The legacy GroupedMLP's gradients go to main_grad as they are multiplied.

    Transformer Engine's grouped experts do that by gradient_accumulation_fusion alone.
    """

    name = "moe_weight_gradient_fusion"
    title = "Gradient accumulation fusion of grouped GEMM"
    group = "MoE"
    level = Level.ALGORITHM
    enabled_by = "gemm_gradient_accumulation_fusion"

    class Options(config.Options):
        """The switch."""

        gemm_gradient_accumulation_fusion: bool = False
        """Add the weight gradients of grouped experts to float32 main_grad as they are
        multiplied."""

    def check(self, options: Any, context: Context) -> None:
        """There must be grouped experts, and buffers to add to."""
        if context.megatron is None:
            return
        flag = context.spelling.name_of("gemm_gradient_accumulation_fusion")
        if not context.argument("moe_grouped_gemm", False):
            raise ConfigError(f"{flag} needs --moe-grouped-gemm: add that or drop {flag}")
        if not context.argument("gradient_accumulation_fusion", True):
            raise ConfigError(
                f"{flag} and --no-gradient-accumulation-fusion contradict each other: drop one"
            )

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the GEMM that GroupedMLP calls, where Megatron still has that class."""
        module = "megatron.core.transformer.moe.grouped_gemm_util"
        if not is_installed(module):
            return
        yield Patch.wrap(
            f"{module}:ops.gmm",
            "mindspeed.compat.stand_ins.grouped_gemm.ops:wrap_gmm",
            why="GroupedMLP calls it; nothing selects another or passes it the parameter",
        )
