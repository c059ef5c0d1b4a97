"""Numbers that a GPU run draws from the host's generator, which is the device's own on a cpu.

A data loader draws a seed when its iteration starts. Were it taken from the generator that dropout
draws from, a run that goes on from a checkpoint would see other masks than one that never stopped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from mindspeed.device.cpu import Cpu


def redirections(cpu: Cpu) -> Iterator[tuple[object, str, object]]:
    """Yield the start of a loader's iteration that leaves the device's generator as it was."""
    yield DataLoader, "__iter__", _leaving_no_trace(DataLoader.__iter__, cpu)


def _leaving_no_trace(original: Callable[..., Any], cpu: Cpu) -> Callable[..., Any]:
    @functools.wraps(original)
    def iterate(loader: DataLoader[Any]) -> Any:
        state = cpu.get_rng_state()
        try:
            return original(loader)
        finally:
            cpu.set_rng_state(state)

    return iterate
