"""What cuda and npu share: a torch module of the same shape (torch.cuda, torch.npu)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from mindspeed.device.base import Device


class Accelerator(Device):
    """A device that torch reaches through a module like torch.cuda."""

    @property
    def module(self) -> ModuleType:
        """The torch module of this device."""
        module: ModuleType = getattr(torch, self.name)
        return module

    def index(self) -> int:
        """Return the index of the current device."""
        return int(self.module.current_device())

    def set_index(self, index: int) -> None:
        """Make one local device the current one."""
        self.module.set_device(index)

    def count(self) -> int:
        """Count the local devices."""
        return int(self.module.device_count())

    def synchronize(self) -> None:
        """Wait for the current device."""
        self.module.synchronize()

    def default_generator(self) -> torch.Generator:
        """Return the generator of the current device."""
        self.module.init()
        generator: torch.Generator = self.module.default_generators[self.index()]
        return generator

    def memory_total(self) -> int:
        """Return the bytes of the current device."""
        return int(self.module.get_device_properties(self.index()).total_memory)

    def memory_allocated(self) -> int:
        """Return the bytes that tensors occupy."""
        return int(self.module.memory_allocated())

    def max_memory_allocated(self) -> int:
        """Return the peak of the bytes that tensors occupied."""
        return int(self.module.max_memory_allocated())

    def reset_peak_memory(self) -> None:
        """Start a new measurement of the peak."""
        self.module.reset_peak_memory_stats()

    def stream(self) -> Any:
        """Create a stream."""
        return self.module.Stream()

    def current_stream(self) -> Any:
        """Return the current stream."""
        return self.module.current_stream()

    def use_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Queue work on a stream while entered."""
        context: AbstractContextManager[object] = self.module.stream(stream)
        return context

    def event(self, timing: bool = False) -> Any:
        """Create an event."""
        return self.module.Event(enable_timing=timing)
