"""Fused cross entropy over the logits of a tensor-parallel vocabulary."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch

_OPERATOR = "mindspeed.ops.cross_entropy.megatron"


class FusedCrossEntropy(Feature):
    """Compute the loss in one pass over the logits, and the gradient in place."""

    name = "fused_cross_entropy"
    title = "Fused cross entropy"
    group = "Fusion"
    level = Level.AFFINITY
    enabled_by = "use_fused_cross_entropy"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switch."""

        use_fused_cross_entropy: bool | None = None
        """Use the fused cross-entropy operator for the loss of language models. Default: on
        CUDA."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap both of Megatron's functions; the one of Transformer Engine is the operator."""
        yield Patch.wrap(
            "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
            f"{_OPERATOR}:wrap_vocab_parallel_cross_entropy",
            why="language models call it directly; no argument selects another without fusion",
        )
        yield Patch.wrap(
            "megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy",
            f"{_OPERATOR}:wrap_fused_vocab_parallel_cross_entropy",
            why="--cross-entropy-loss-fusion selects it by default",
        )
