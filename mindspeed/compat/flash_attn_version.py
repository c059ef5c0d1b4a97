"""Whether flash-attn is new enough, asked on a machine that may have none."""

from __future__ import annotations

import functools
from collections.abc import Callable


def wrap_is_fa_min_version(original: Callable[..., bool]) -> Callable[..., bool]:
    """Answer no where flash-attn is absent; flash-attn-4 lies in its folder but is not it."""

    @functools.wraps(original)
    def is_fa_min_version(version: str, check_equality: bool = True) -> bool:
        try:
            return original(version, check_equality)
        except ImportError:
            return False

    return is_fa_min_version
