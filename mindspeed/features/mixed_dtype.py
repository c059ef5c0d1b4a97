"""Local layer specs run on parameters of different floating types."""

from collections.abc import Iterator
from typing import Any

from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class MixedDtype(Feature):
    """Without it a bare GPTModel with half-precision params_dtype cannot run a forward pass."""

    name = "mixed_dtype"
    title = "Parameters of mixed types"
    group = "Foundation"
    level = Level.COMPAT
    devices = ("cpu", "cuda")

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap where two types meet: Megatron has no constructor argument or spec for this."""
        for name in (
            "linear_with_grad_accumulation_and_async_allreduce",
            "linear_with_frozen_weight",
        ):
            yield Patch.wrap(
                f"megatron.core.tensor_parallel.layers:{name}",
                "mindspeed.compat.mixed_dtype:promote",
                why="params_dtype leaves norms and positions in float32",
            )
        yield Patch.wrap(
            "megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.forward",
            "mindspeed.compat.mixed_dtype:keep_type",
            why="config.bf16 alone turns the probabilities of float32 scores into bfloat16",
        )
