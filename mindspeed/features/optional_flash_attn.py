"""Megatron asks which flash-attn is installed as if there always were one."""

from collections.abc import Iterator
from typing import Any

from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class OptionalFlashAttn(Feature):
    """Without flash-attn the answer is "too old", so Megatron says what it needs it for."""

    name = "optional_flash_attn"
    title = "Optional flash-attn"
    group = "Foundation"
    level = Level.COMPAT

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the question."""
        yield Patch.wrap(
            "megatron.core.utils:is_fa_min_version",
            "mindspeed.compat.flash_attn_version:wrap_is_fa_min_version",
            why="it fails in an import where the caller has a message of its own",
        )
