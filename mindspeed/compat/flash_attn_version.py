"""Whether flash-attn is new enough, asked on a machine that may have none."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable


def wrap_is_fa_min_version(original: Callable[..., bool]) -> Callable[..., bool]:
    """Answer no where flash-attn is absent."""

    @functools.wraps(original)
    def is_fa_min_version(version: str, check_equality: bool = True) -> bool:
        if importlib.util.find_spec("flash_attn") is None:
            return False
        return original(version, check_equality)

    return is_fa_min_version
