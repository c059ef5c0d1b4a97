"""The cpu: the embedded default, the test bed and the laptop debugger."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import AbstractContextManager

import torch

from mindspeed.device.amx import avoid_trapping_amx
from mindspeed.device.base import Device
from mindspeed.device.timeline import Event, Stream


class Cpu(Device):
    """Host memory and gloo. Every rank of a machine shares the one cpu, under its own index."""

    name = "cpu"
    backend = "gloo"

    def __init__(self) -> None:
        self._index = int(os.environ.get("LOCAL_RANK", "0"))
        self._stream = Stream()

    def unusable_reason(self) -> str | None:
        """Never: the cpu is always there."""
        return None

    def facade(self) -> AbstractContextManager[object]:
        """Send calls of torch.cuda to the cpu."""
        from mindspeed.device.facade import Facade

        avoid_trapping_amx()
        return Facade(self)

    @property
    def torch_device(self) -> torch.device:
        """The cpu has no index in torch."""
        return torch.device("cpu")

    def index(self) -> int:
        """Return the local rank, which stands for a device index."""
        return self._index

    def set_index(self, index: int) -> None:
        """Remember the index: code written for several devices asks for it back."""
        self._index = index

    def count(self) -> int:
        """Count the local ranks, since each of them is one device to Megatron."""
        local_world = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE")
        return int(local_world) if local_world else 1

    def synchronize(self) -> None:
        """Nothing is queued on a cpu."""

    def default_generator(self) -> torch.Generator:
        """Return torch's own default generator."""
        return torch.default_generator

    def memory_allocated(self) -> int:
        """Return the resident set of this process."""
        try:
            with open("/proc/self/statm") as statm:
                return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return self.max_memory_allocated()

    def max_memory_allocated(self) -> int:
        """Return the peak resident set of this process."""
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset_peak_memory(self) -> None:
        """The operating system keeps the peak of the whole process; it cannot be reset."""

    def stream(self) -> Stream:
        """Create a stream that runs everything at once, in order."""
        return Stream()

    def current_stream(self) -> Stream:
        """Return the one stream of a cpu."""
        return self._stream

    def event(self, timing: bool = False) -> Event:
        """Create an event that reads the host clock."""
        return Event(enable_timing=timing)
