"""The cpu: the embedded default, the test bed and the laptop debugger."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
from contextlib import AbstractContextManager

import torch

from mindspeed.device.base import Device
from mindspeed.device.streams import Event, Stream
from mindspeed.distributed import environment

logger = logging.getLogger(__name__)

_ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_AMX = "AVX512_CORE_FP16"


class Cpu(Device):
    """Host memory and gloo. Every rank of a machine shares the one cpu, under its own index."""

    name = "cpu"
    backend = "gloo"
    is_asynchronous = False

    def __init__(self) -> None:
        self._index = environment.local_rank()
        self._stream = Stream()

    def unusable_reason(self) -> str | None:
        """Return None: the cpu is always usable."""
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
        return environment.local_world_size()

    def synchronize(self) -> None:
        """Nothing is queued on a cpu."""

    def default_generator(self) -> torch.Generator:
        """Return torch's own default generator."""
        return torch.default_generator

    def memory_total(self) -> int:
        """Return the bytes of this machine, which its ranks share."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def memory_allocated(self) -> int:
        """Return the resident set of this process."""
        return _status("VmRSS") or _peak_of_process()

    def max_memory_allocated(self) -> int:
        """Return the peak resident set of this process."""
        return max(_status("VmHWM") or _peak_of_process(), self.memory_allocated())

    def reset_peak_memory(self) -> None:
        """Start a new measurement; only Linux can, elsewhere the peak is that of the process."""
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as clear_refs:
            clear_refs.write("5")

    def stream(self) -> Stream:
        """Create a stream that runs everything at once, in order."""
        return Stream()

    def current_stream(self) -> Stream:
        """Return the one stream of a cpu."""
        return self._stream

    def use_stream(self, stream: Stream) -> Stream:
        """Return the stream, which is its own context."""
        return stream

    def host_buffer(self, size: int) -> torch.Tensor:
        """Return bytes of plain memory."""
        return torch.empty(size, dtype=torch.uint8)

    def event(self, timing: bool = False) -> Event:
        """Create an event that reads the host clock."""
        return Event(enable_timing=timing)


def _status(key: str) -> int:
    """Read a size, in bytes, from Linux's status of this process; 0 elsewhere."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return 0


def _peak_of_process() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def avoid_trapping_amx() -> None:
    """Limit oneDNN below AMX if a bf16 matmul dies of an illegal instruction.

    Some virtual machines advertise AMX and trap it. oneDNN reads the variable at its first call,
    so this has to run before any matmul.
    """
    if _ISA_VARIABLE in os.environ or not _claims_amx() or _bf16_matmul_works():
        return
    os.environ[_ISA_VARIABLE] = _WITHOUT_AMX
    _bf16_matmul()  # oneDNN reads the variable now, and later changes have no effect
    logger.debug("AMX is advertised but traps here; set %s=%s", _ISA_VARIABLE, _WITHOUT_AMX)


def _claims_amx() -> bool:
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            return any("amx_tile" in line for line in cpuinfo if line.startswith("flags"))
    except OSError:
        return False


def _bf16_matmul_works() -> bool:
    """Try it in a forked child: the trap is a signal that cannot be caught."""
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        signal.signal(signal.SIGILL, signal.SIG_DFL)
        _bf16_matmul()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGILL)


def _bf16_matmul() -> None:
    a = torch.ones(64, 64, dtype=torch.bfloat16)
    torch.mm(a, a)
