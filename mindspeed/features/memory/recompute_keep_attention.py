"""Full recompute without the forward pass of attention."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.features.memory.megatron import check_full_recompute
from mindspeed.patching import Patch


class RecomputeKeepAttention(Feature):
    """Keep the results of attention in layers that are recomputed as a whole."""

    name = "recompute_keep_attention"
    title = "Recompute without attention"
    group = "Memory"
    level = Level.COMPAT
    enabled_by = "recompute_keep_attention"

    class Options(config.Options):
        """The switch."""

        recompute_keep_attention: bool = False
        """Keep the output of attention in fully recomputed layers, so that backward does not
        compute it again: for long sequences, at twice the memory of the layers' inputs."""

    def check(self, options: Any, context: Context) -> None:
        """There must be such layers."""
        if context.megatron is None:
            return
        flag = context.spelling.name_of("recompute_keep_attention")
        check_full_recompute(flag, context)
        if context.argument("fp8", False):
            raise ConfigError(f"{flag} and --fp8-format exclude each other: drop one")

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap what checkpoints a layer.

        Of several wraps the one of the last name is the outer one: recompute_in_advance, which
        replaces the function, gets what this one made of it.
        """
        yield Patch.wrap(
            "megatron.core.tensor_parallel.random:checkpoint",
            "mindspeed.memory.kept_attention:wrap_checkpoint",
            why="it runs a layer twice; no argument says what the first run keeps",
        )
