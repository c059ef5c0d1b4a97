"""The generator of the host, which is the device's own on a cpu.

A data loader draws a seed when its iteration starts. Were it taken from the generator that dropout
draws from, a run that resumes from a checkpoint would see other masks than one that never stopped.
Megatron forks the device's generator and warns when the cpu's moved; here they are one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from mindspeed.device.cpu import Cpu

_LOGGER = "megatron.core.tensor_parallel.random"
_MESSAGE = "CPU RNG state changed within GPU RNG context"


def redirections(cpu: Cpu) -> Iterator[tuple[object, str, object]]:
    """Yield a loader's iteration that keeps the generator, and the filters of Megatron's logger."""
    yield DataLoader, "__iter__", _keep_rng_state(DataLoader.__iter__, cpu)
    logger = logging.getLogger(_LOGGER)
    yield logger, "filters", [*logger.filters, lambda record: record.msg != _MESSAGE]


def _keep_rng_state(original: Callable[..., Any], cpu: Cpu) -> Callable[..., Any]:
    @functools.wraps(original)
    def iterate(loader: DataLoader[Any]) -> Any:
        state = cpu.get_rng_state()
        try:
            return original(loader)
        finally:
            cpu.set_rng_state(state)

    return iterate
