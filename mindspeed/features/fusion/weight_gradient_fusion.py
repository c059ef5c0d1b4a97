"""Weight gradients that are added to float32 main_grad as they are multiplied."""

from typing import Any

from mindspeed.features.base import Context, Feature, Level


class WeightGradientFusion(Feature):
    """Megatron's own switch; the linear layers of every spec reach the operator by themselves."""

    name = "weight_gradient_fusion"
    title = "Gradient accumulation fusion"
    group = "Fusion"
    level = Level.COMPAT
    megatron_flags = ("--no-gradient-accumulation-fusion",)

    def is_on(self, options: Any, context: Context) -> bool:
        """On unless --no-gradient-accumulation-fusion is given."""
        return bool(context.argument("gradient_accumulation_fusion", True))
