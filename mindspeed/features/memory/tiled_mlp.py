"""MLPs over tiles of the sequence."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.patching import Patch


class TiledMlp(Feature):
    """Run dense MLPs over a part of the sequence at a time, and recompute it in backward."""

    name = "tiled_mlp"
    title = "Tiled MLP"
    group = "Memory"
    level = Level.COMPAT
    enabled_by = "tiled_mlp_size"
    conflicts = {"recompute_activation": "a tiled MLP keeps no activation anyhow"}

    class Options(config.Options):
        """The size of a tile, which is the switch."""

        tiled_mlp_size: Annotated[int, Field(ge=1)] | None = None
        """Positions of the sequence (of this rank's part of it) that go through an MLP at a time;
        each tile keeps only its input. Default: all."""

    def check(self, options: Any, context: Context) -> None:
        """Experts get their own tokens, and what is computed twice must draw nothing."""
        flag = context.spelling.name_of("tiled_mlp_size")
        if context.argument("num_experts"):
            raise ConfigError(
                f"{flag} is for dense MLPs, and the layers of this model have experts: drop {flag}"
            )
        if dropout := context.argument("lora_dropout", 0.0):
            raise ConfigError(
                f"{flag} computes the first linear of an MLP twice, and --lora-dropout {dropout} "
                "would differ: use --lora-dropout 0, or drop one"
            )

    def patches(self, options: Any) -> Iterator[Patch]:
        """Set the tiles of a new block's MLPs."""
        yield Patch.wrap(
            "megatron.core.transformer.transformer_block:TransformerBlock.__init__",
            bind("mindspeed.memory.tiled_mlp:wrap_transformer_block_init", options.tiled_mlp_size),
            why="an MLP is built by its layer; no spec or argument cuts its input",
        )
