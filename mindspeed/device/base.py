"""The protocol that every device implements."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch

from mindspeed.device.tracing import TorchTracer, TraceContent, Tracer


class DeviceError(RuntimeError):
    """A requested device cannot be used on this machine."""


class Device(abc.ABC):
    """One kind of device: where tensors live, the backend of its ranks, its random generator."""

    name: ClassVar[str]
    backend: ClassVar[str]
    """The process-group backend native to this device."""
    deterministic_env: ClassVar[Mapping[str, str]] = {}
    """Environment variables that pin the order of reductions in this device's libraries."""
    is_asynchronous: ClassVar[bool] = True
    """Whether work is queued, and done while the host goes on."""
    overlaps_kernels: ClassVar[bool] = False
    """Whether kernels of a second stream run on processors that those of the first leave idle."""
    group_buffers: ClassVar[str | None] = None
    """How `group_options` bounds the buffer of a communicator; None where there is none."""

    @abc.abstractmethod
    def unusable_reason(self) -> str | None:
        """Return why this device cannot be used here, or None when it can."""

    @abc.abstractmethod
    def facade(self) -> AbstractContextManager[object]:
        """Redirect code written for torch.cuda to this device while entered."""

    @property
    def torch_device(self) -> torch.device:
        """The device of the current rank, ready for tensor factories."""
        return torch.device(self.name, self.index())

    @abc.abstractmethod
    def index(self) -> int:
        """Return the index of the current device on this machine."""

    @abc.abstractmethod
    def set_index(self, index: int) -> None:
        """Make one local device the current one."""

    @abc.abstractmethod
    def count(self) -> int:
        """Count the local devices."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until all work queued on the current device is done."""

    @abc.abstractmethod
    def default_generator(self) -> torch.Generator:
        """Return the generator that random ops on this device draw from."""

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the current device."""
        self.default_generator().manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        """Return a copy of the generator state of the current device."""
        return self.default_generator().get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Put the generator of the current device into a saved state."""
        self.default_generator().set_state(state)

    def multiprocessors(self) -> int:
        """Return how many programs of a kernel run side by side; 1 where it is not known."""
        return 1

    def capability(self) -> tuple[int, int] | None:
        """Return the generation of a CUDA device, (9, 0) for Hopper; None for other devices."""
        return None

    @abc.abstractmethod
    def memory_total(self) -> int:
        """Return the bytes that the current device has."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error means that this device, or the host, has no memory left."""
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        # The allocators of hosts and of torch_npu raise plain RuntimeErrors.
        text = str(error).lower()
        return isinstance(error, RuntimeError) and (
            "out of memory" in text or "can't allocate memory" in text
        )

    @abc.abstractmethod
    def memory_allocated(self) -> int:
        """Return the bytes in use now."""

    @abc.abstractmethod
    def max_memory_allocated(self) -> int:
        """Return the largest number of bytes in use since the peak was last reset."""

    @abc.abstractmethod
    def reset_peak_memory(self) -> None:
        """Start a new measurement of the peak."""

    @abc.abstractmethod
    def stream(self) -> Any:
        """Create a new stream."""

    @abc.abstractmethod
    def current_stream(self) -> Any:
        """Return the stream that work is queued on now."""

    @abc.abstractmethod
    def use_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Queue work on a stream while entered."""

    can_record: ClassVar[bool] = False
    """Whether this device replays recorded work with one launch."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return what does the work of a step again, on the same memory.

        A device that records runs the step once before, and what it replays does not call it. The
        others return the step itself. RuntimeError means that the step cannot be recorded.
        """
        return step

    def host_buffer(self, size: int) -> torch.Tensor:
        """Return bytes of host memory that this device copies from and to by itself."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    @abc.abstractmethod
    def event(self, timing: bool = False) -> Any:
        """Create an event."""

    def tracer(self, folder: Path, rank: int, content: TraceContent) -> Tracer:
        """Return what records some steps of a rank, and writes to a folder."""
        return TorchTracer(folder, rank, content)

    def group_options(self, buffer_mib: int, options: Any = None) -> Any:
        """Return process-group options that bound the buffer of a communicator.

        `options` are those that the group would get without. A backend that keeps no buffers of its
        own gets just these; `group_buffers` says so.
        """
        return options

    def make_deterministic(self) -> None:
        """Ask torch and this device's libraries for bitwise repeatable results."""
        os.environ.update(self.deterministic_env)
        torch.use_deterministic_algorithms(True)
        # torch would also fill all new memory, in case it is read before it is written: tens of
        # gigabytes a step.
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False
