"""Fused rotary position embedding in every layer spec."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.patching import Patch

PACKAGE = "mindspeed.ops.rotary_position_embedding.megatron"


class FusedRotary(Feature):
    """Rotate queries and keys by one operator, out of the packed qkv tensor where there is one."""

    name = "fused_rotary"
    title = "Fused rotary embedding"
    group = "Fusion"
    level = Level.AFFINITY
    enabled_by = "use_fused_rotary_pos_emb"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switch."""

        use_fused_rotary_pos_emb: bool | None = None
        """Use the fused rotary position embedding. Default: on CUDA."""

    def check(self, options: Any, context: Context) -> None:
        """The model must have rotary embeddings."""
        given = context.argument("position_embedding_type")
        if given is not None and given not in ("rope", "mrope", "yarn"):
            flag = context.spelling.name_of("use_fused_rotary_pos_emb")
            raise ConfigError(
                f"{flag} needs --position-embedding-type rope, not {given}: change that or drop "
                f"{flag}"
            )

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the one function, and the forward that asks for the packed way."""
        yield Patch.wrap(
            "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
            f"{PACKAGE}:wrap_apply_rotary_pos_emb",
            why="attention calls this function directly; the config's fusion flag is per model",
        )
        yield Patch.wrap(
            "megatron.core.transformer.attention:Attention.forward",
            f"{PACKAGE}:wrap_attention_forward",
            why="the config decides once what only a call can know: whether qkv stays packed",
        )
