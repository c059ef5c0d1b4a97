"""The loss over tiles of the sequence."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from mindspeed import config
from mindspeed.features.base import Feature, Level, bind
from mindspeed.patching import Patch


class TiledLoss(Feature):
    """Compute output layer and loss of a part of the sequence at a time."""

    name = "tiled_loss"
    title = "Tiled loss"
    group = "Memory"
    level = Level.ALGORITHM  # that of the operator which it calls, and outside of it
    enabled_by = "tiled_loss_size"
    requires = ("linear_cross_entropy",)

    class Options(config.Options):
        """The size of a tile, which is the switch."""

        tiled_loss_size: Annotated[int, Field(ge=1)] | None = None
        """Positions of the sequence (of this rank's part of it) whose logits exist at a time; they
        are computed again in backward. Default: all."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Cut what the operator gets."""
        yield Patch.wrap(
            "megatron.core.models.common.language_module.language_module:"
            "LanguageModule.compute_language_model_loss",
            bind(
                "mindspeed.memory.tiled_loss:wrap_compute_language_model_loss",
                options.tiled_loss_size,
            ),
            why="the model computes its loss here; no argument cuts it",
        )
