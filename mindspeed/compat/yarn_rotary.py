"""Build Megatron's YaRN rotary embedding on the cpu."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    """Ask for initialization on the cpu, whatever the caller asked for."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.arguments["use_cpu_initialization"] = True
        original(*given.args, **given.kwargs)

    return __init__
