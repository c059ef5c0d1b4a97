"""Attention that waits for backward in host memory."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.features.memory.megatron import check_beside_recompute
from mindspeed.patching import Patch

_NAMES = ("input_norm", "self_attention", "post_attention_norm")


class SwapAttention(Feature):
    """Keep what attention saves for backward in host memory, copied beside the computation."""

    name = "swap_attention"
    title = "swap_attention"
    group = "Memory"
    level = Level.COMPAT
    enabled_by = "swap_attention"

    class Options(config.Options):
        """The switch and the modules."""

        swap_attention: bool = False
        """Keep what attention saves for backward in pinned host memory between forward and
        backward. No effect on a cpu."""
        swap_modules: str = "input_norm,self_attention,post_attention_norm"
        """Modules of a layer to swap, by name; norms that are part of the next linear are swapped
        with it."""

    def check(self, options: Any, context: Context) -> None:
        """Whole layers may be recomputed before these, in blocks only."""
        flag = context.spelling.name_of("swap_attention")
        check_beside_recompute(flag, context)
        if context.argument("cpu_offloading", False):
            raise ConfigError(f"{flag} and --cpu-offloading exclude each other: drop one")
        unknown = sorted(set(_split(options.swap_modules)) - set(_NAMES))
        if unknown or not _split(options.swap_modules):
            given = context.spelling.with_value("swap_modules", options.swap_modules)
            raise ConfigError(f"{given}: use a comma-separated list of {', '.join(_NAMES)}")

    def patches(self, options: Any) -> Iterator[Patch]:
        """Mark the layers of a new block, and wrap attention."""
        package = "mindspeed.memory.swap_attention"
        yield Patch.wrap(
            "megatron.core.transformer.transformer_block:TransformerBlock.__init__",
            bind(f"{package}:wrap_transformer_block_init", _split(options.swap_modules)),
            why="the block knows which of its layers are recomputed as a whole",
        )
        for where in (
            "attention:Attention.forward",
            "multi_latent_attention:MultiLatentAttention.forward",
        ):
            yield Patch.wrap(
                f"megatron.core.transformer.{where}",
                f"{package}:wrap_attention_forward",
                why="hooks of the module would keep residual sums from computing its norm",
            )


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())
