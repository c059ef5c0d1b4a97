"""Gradients of embeddings that touch the rows that were looked up, and no others."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class EmbeddingGradient(Feature):
    """Add the gradient of an embedding to float32 main_grad row by row."""

    name = "embedding_gradient"
    title = "Embedding gradient fusion"
    group = "Fusion"
    level = Level.AFFINITY
    enabled_by = "fuse_embedding_gradient"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switch."""

        fuse_embedding_gradient: bool | None = None
        """Add gradients of the embedding to main_grad by rows, where gradient accumulation is
        fused and the vocabulary is not split. Default: on CUDA."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Replace the lookup where its gradient goes to main_grad."""
        layer = "megatron.core.tensor_parallel.layers:VocabParallelEmbedding"
        own = "mindspeed.parallel.tensor.embedding"
        yield Patch.wrap(
            f"{layer}.__init__",
            f"{own}:wrap_embedding_init",
            why="an embedding does not keep whether gradient accumulation is fused",
        )
        yield Patch.wrap(
            f"{layer}.forward",
            f"{own}:wrap_embedding_forward",
            why="torch's gradient of an embedding is as large as the vocabulary",
        )
