"""Distributed checkpoints of megatron-core 0.12 on a torch that asks for one more argument."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

FORMAT = "serialization_format"


def wrap_write_item(original: Callable[..., Any]) -> Callable[..., Any]:
    """Write in the format torch always used where the caller, older, does not choose."""
    signature = inspect.signature(original)
    if FORMAT not in signature.parameters:
        return original
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    @functools.wraps(original)
    def _write_item(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs)
        given.arguments.setdefault(FORMAT, SerializationFormat.TORCH_SAVE)
        return original(*given.args, **given.kwargs)

    return _write_item
