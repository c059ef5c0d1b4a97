"""The output layer and the loss of a GPT in one operator."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from mindspeed import config
from mindspeed.features.base import Feature, Level, bind
from mindspeed.patching import Patch, is_installed

_OPERATOR = "mindspeed.ops.linear_cross_entropy.megatron"


class LinearCrossEntropy(Feature):
    """Compute the loss from hidden states, with logits of a part of the vocabulary at a time."""

    name = "linear_cross_entropy"
    title = "Linear cross entropy"
    group = "Fusion"
    level = Level.ALGORITHM
    enabled_by = "linear_cross_entropy"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switch and its memory."""

        linear_cross_entropy: bool | None = None
        """Compute a GPT's output layer and loss in one, without all logits. Default: on CUDA."""
        linear_cross_entropy_gib: Annotated[float | None, Field(gt=0)] = None
        """GiB of logits to keep for backward; the rest is computed again there. Default: a
        fifteenth of the device's memory."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Postpone the logits where the output layer is called, and compute them in the loss."""
        gib = options.linear_cross_entropy_gib
        yield Patch.wrap(
            f"megatron.core.models.gpt.gpt_model:GPTModel.{_caller_of_output_layer()}",
            f"{_OPERATOR}:wrap_caller_of_output_layer",
            why="the model builds its output layer itself, no spec names it",
        )
        yield Patch.wrap(
            "megatron.core.models.common.language_module.language_module:"
            "LanguageModule.compute_language_model_loss",
            bind(
                f"{_OPERATOR}:wrap_compute_language_model_loss",
                None if gib is None else int(gib * 2**30),
            ),
            why="this is where the logits are used and nowhere else",
        )


def _caller_of_output_layer() -> str:
    """Return the method of GPTModel that calls its output layer and its loss."""
    # Releases with this module call the first without forward (--overlap-moe-expert-parallel-comm).
    is_apart = is_installed("megatron.core.models.gpt.fine_grained_callables")
    return "_postprocess" if is_apart else "forward"
