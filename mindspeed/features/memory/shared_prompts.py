"""The common prompt of a preference pair, computed once for both sequences."""

from collections.abc import Iterator
from typing import Any

from mindspeed.features.base import Context, Feature, Level
from mindspeed.features.parallel.context_parallel import ROTARY, SOCKET
from mindspeed.patching import Patch


class SharedPrompts(Feature):
    """The common prompt of a preference pair (dpo, simpo, orm) is computed once."""

    name = "shared_prompts"
    title = "Shared prompts"
    group = "Memory"
    level = Level.COMPAT
    megatron_flags = ("--no-share-prompts",)  # of posttrain_gpt.py, which decides and batches

    def is_on(self, options: Any, context: Context) -> bool:
        """The trainer has found nothing in its way."""
        return bool(context.argument("shares_prompts", False))

    def patches(self, options: Any) -> Iterator[Patch]:
        """Give rows the angles of their positions; attention finds their keys by itself."""
        yield Patch.wrap(
            ROTARY,
            f"{SOCKET}:wrap_apply_rotary_pos_emb",
            why="Megatron takes every packed document to begin at position 0",
        )
