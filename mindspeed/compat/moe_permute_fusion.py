"""Megatron's moe_permute_fusion, switched on for every model with experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap_post_init(original: Callable[..., None]) -> Callable[..., None]:
    """Set the field before `TransformerConfig` checks what goes with it."""

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        if self.num_moe_experts is not None:
            self.moe_permute_fusion = True
        original(self)

    return post_init
