"""Keep oneDNN off AMX where the processor claims it and traps it, as some virtual machines do."""

from __future__ import annotations

import logging
import os
import signal

import torch

logger = logging.getLogger(__name__)

_SWITCH = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_AMX = "AVX512_CORE_FP16"


def avoid_trapping_amx() -> None:
    """Limit oneDNN below AMX if a bf16 product dies of an illegal instruction.

    oneDNN reads the switch at its first call, so this has to run before any matrix product.
    """
    if _SWITCH in os.environ or not _claims_amx() or _bf16_product_works():
        return
    os.environ[_SWITCH] = _WITHOUT_AMX
    _bf16_product()  # oneDNN reads the switch now, and stays so whatever becomes of the variable
    logger.debug("AMX is advertised but traps here; set %s=%s", _SWITCH, _WITHOUT_AMX)


def _claims_amx() -> bool:
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            return any("amx_tile" in line for line in cpuinfo if line.startswith("flags"))
    except OSError:
        return False


def _bf16_product_works() -> bool:
    """Try it in a forked child: the trap is a signal that nobody can catch."""
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        signal.signal(signal.SIGILL, signal.SIG_DFL)
        _bf16_product()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGILL)


def _bf16_product() -> None:
    a = torch.ones(64, 64, dtype=torch.bfloat16)
    torch.mm(a, a)
