"""The gradient of Megatron's fused loss in the type of the logits."""

from collections.abc import Iterator
from typing import Any

from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class Float32LossGradient(Feature):
    """Megatron's fused loss rounds the gradient of float32 logits to bfloat16."""

    name = "float32_loss_gradient"
    title = "Fused loss in float32"
    group = "Foundation"
    level = Level.COMPAT

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the function: the type that it rounds to is written into it."""
        yield Patch.wrap(
            "megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy",
            "mindspeed.ops.cross_entropy.megatron:wrap_unless_bfloat16",
            why="its gradient is bfloat16 whatever the logits are",
        )
