"""Log lines of Megatron that are true of a GPU only."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed.device.cpu import Cpu

# Megatron forks the device's generator and warns when the cpu's moved; here they are one.
_LOGGER = "megatron.core.tensor_parallel.random"
_MESSAGE = "CPU RNG state changed within GPU RNG context"


def redirections(cpu: Cpu) -> Iterator[tuple[object, str, object]]:
    """Yield the logger's filters with ours added."""
    logger = logging.getLogger(_LOGGER)
    yield logger, "filters", [*logger.filters, lambda record: record.msg != _MESSAGE]
