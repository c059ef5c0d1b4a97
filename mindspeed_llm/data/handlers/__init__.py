"""Handlers, which render records: one class for every layout that `--handler-name` can name."""

from mindspeed_llm.data.handlers.base import Columns, Context, Handler, Output
from mindspeed_llm.data.handlers.registry import (
    HANDLERS,
    PRETRAIN,
    find_handler,
    similar_handlers,
)

__all__ = [
    "HANDLERS",
    "PRETRAIN",
    "Columns",
    "Context",
    "Handler",
    "Output",
    "find_handler",
    "similar_handlers",
]
