"""megatron.training.get_model in a script that has no arguments."""

from collections.abc import Iterator
from typing import Any

from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class ModelWithoutArguments(Feature):
    """A loop of one's own builds its model with get_model although nothing was parsed."""

    name = "model_without_arguments"
    title = "get_model without arguments"
    group = "Foundation"
    level = Level.COMPAT

    def patches(self, options: Any) -> Iterator[Patch]:
        """Where Megatron's arguments are missing, let the model's own configuration decide."""
        yield Patch.wrap(
            "megatron.training.training:get_model",
            "mindspeed.compat.megatron_training.training:wrap_get_model",
            why="it reads a global namespace that only its own scripts fill",
        )
