"""Flash attention in models that are built from Megatron's local layer specs."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.patching import Patch


class FlashAttention(Feature):
    """Attend without ever holding the scores of all queries and keys."""

    name = "flash_attention"
    title = "Flash attention"
    group = "Fusion"
    level = Level.AFFINITY
    enabled_by = "use_flash_attn"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switches."""

        use_flash_attn: bool | None = None
        """Use flash attention where a local layer spec attends; the fastest backend for the shape
        is chosen. Default: on CUDA."""

        use_fusion_attn_v2: bool = False
        """Accepted for scripts that use it: one attention serves both versions, so this asks for
        flash attention too."""

    def is_on(self, options: Any, context: Context) -> bool:
        """Either switch asks for it."""
        return bool(options.use_flash_attn or options.use_fusion_attn_v2)

    def is_undecided(self, options: Any) -> bool:
        """Leave it to the device where neither switch is set."""
        return options.use_flash_attn is None and not options.use_fusion_attn_v2

    def check(self, options: Any, context: Context) -> None:
        """A causal layer must not need its mask tensor: documents kept apart by it would mix."""
        is_local = context.argument("transformer_impl") == "local"
        if is_local and context.argument("reset_attention_mask"):
            flag = context.spelling.name_of("use_flash_attn")
            raise ConfigError(
                f"{flag} and --reset-attention-mask cannot be used together with "
                "--transformer-impl local, whose causal attention takes no mask: drop one"
            )

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the attention of the local specs."""
        yield Patch.wrap(
            "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
            "mindspeed.te.pytorch.attention.local:wrap_dot_product_attention_forward",
            why="local specs name this class; a spec with another one would be another model",
        )
