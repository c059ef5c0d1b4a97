"""ALiBi: attention that prefers near tokens, in place of position embeddings."""

from collections.abc import Iterator
from typing import Any, Literal

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.features.parallel.context_parallel import LOCAL, SOCKET, TE
from mindspeed.patching import Patch


class Alibi(Feature):
    """Subtract from each score the distance of the two tokens times a slope of the head."""

    name = "alibi"
    title = "ALiBi"
    group = "Fusion"
    level = Level.COMPAT
    megatron_flags = ("--position-embedding-type",)
    megatron_choices = {"position_embedding_type": ("alibi",)}

    class Options(config.Options):
        """Variants, under the names that the documents use."""

        alibi_fusion_attn_type: Literal[0, 2] = 2
        """Accepted for scripts that use it: the bias is always made from the slopes (2), with the
        numbers of a tensor that is passed in (0)."""

        alibi_diagonal_opposite: bool = False
        """Add the distance instead of subtracting it."""

        square_alibi_mask: bool = False
        """Accepted for scripts that use it: the bias has a row for every token anyway."""

        fill_neg_inf: bool = False
        """Accepted for scripts that use it: a causal layer never sees later tokens."""

    def is_on(self, options: Any, context: Context) -> bool:
        """Megatron's own flag asks for it."""
        return bool(context.argument("position_embedding_type") == "alibi")

    def check(self, options: Any, context: Context) -> None:
        """Latent attention and Megatron's fused attention have a place for rotary angles only."""
        if context.argument("multi_latent_attention"):
            raise ConfigError(
                "--position-embedding-type alibi and --multi-latent-attention cannot be used "
                "together: latent attention needs rotary embeddings; use rope"
            )

    def patches(self, options: Any) -> Iterator[Patch]:
        """Give the slopes to the attention of both specs."""
        alibi = bind(f"{SOCKET}:wrap_alibi_init", options.alibi_diagonal_opposite)
        why = "Megatron has no ALiBi; the slopes follow from the number of heads"
        yield Patch.wrap(f"{TE}.__init__", alibi, why=why)
        yield Patch.wrap(
            f"{LOCAL}.__init__",
            bind(f"{SOCKET}:wrap_local_alibi_init", options.alibi_diagonal_opposite),
            why=why,
        )
        yield Patch.wrap(
            f"{LOCAL}.forward",
            f"{SOCKET}:wrap_local_forward",
            why="Megatron's own attention of local specs takes no bias",
        )
