"""Throughput of a training run: operations of a step, counted once, over the time of a step."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from mindspeed import device
from mindspeed.tune.flop_counter import FlopCounter, Flops

logger = logging.getLogger(__name__)

MODEL = "model throughput per GPU (TFLOP/s/GPU)"
HARDWARE = "hardware throughput per GPU (TFLOP/s/GPU)"


class FlopMeter:
    """Counts the first step of each size; later steps of that size do the same work."""

    def __init__(self) -> None:
        self._counted: dict[Hashable, Flops] = {}
        self._size: Hashable = None

    @contextmanager
    def step(self, size: Hashable = None) -> Iterator[None]:
        """Measure one train step; `size` identifies steps that do the same work."""
        self._size = size
        if size in self._counted:
            yield
            return
        with FlopCounter() as counter:
            yield
        self._counted[size] = flops = _mean_over_ranks(counter.flops)
        logger.info(
            "FLOPs per step and device: %.4e, %.4e with recomputation",
            flops.model,
            flops.hardware,
        )

    @property
    def flops(self) -> Flops | None:
        """The operations of the last step per device; None before the first."""
        return self._counted.get(self._size)

    def rates(self, seconds: float) -> dict[str, float]:
        """Return TFLOP/s per device of steps that took `seconds` each."""
        if self.flops is None:
            return {}
        tera = 1e12 * seconds
        return {MODEL: self.flops.model / tera, HARDWARE: self.flops.hardware / tera}


def _mean_over_ranks(flops: Flops) -> Flops:
    """Average over all ranks: pipeline stages and experts do different amounts of work."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return flops
    # In thousands: integers are exact on every device, and the sum over many ranks has to fit.
    row = torch.tensor([round(flops.model / 1e3), round(flops.hardware / 1e3)])
    row = row.to(device.current().torch_device)
    torch.distributed.all_reduce(row)
    model, hardware = (1e3 * total / torch.distributed.get_world_size() for total in row.tolist())
    return Flops(model, hardware)
