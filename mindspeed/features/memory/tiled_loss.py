"""The loss over tiles of the sequence."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.patching import Patch

UNSERVED = (
    *("mtp_num_layers", "defer_embedding_wgrad_compute", "cpu_offloading", "use_mup"),
    *("use_megatron_fsdp", "use_custom_fsdp", "config_logger_dir"),
)
"""Megatron's arguments with which linear cross entropy leaves the output layer alone."""


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

    def check(self, options: Any, context: Context) -> None:
        """The output layer is one whose logits linear cross entropy can defer."""
        flag = context.spelling.name_of("tiled_loss_size")
        for argument in UNSERVED:
            if context.argument(argument):
                name = config.flag_name(argument)
                raise ConfigError(f"{flag} and {name} exclude each other: drop one")
        if rows := context.argument("hidden_vocab_rows", 0):
            raise ConfigError(
                f"{flag} needs a vocabulary without padding, and {rows} of its rows are padding: "
                f"use --make-vocab-size-divisible-by 1, or drop {flag}"
            )

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
