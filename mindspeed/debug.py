"""Make a rank wait for a debugger: one port per rank, on loopback unless asked otherwise.

MINDSPEED_DEBUG_RANKS (0,2 or all) selects ranks, MINDSPEED_DEBUG_HOST the address to listen on.
"""

import ipaddress
import logging
import os
import sys
from types import ModuleType

from mindspeed.config import ConfigError
from mindspeed.distributed import environment

BASE_PORT = 22333
_RANKS = "MINDSPEED_DEBUG_RANKS"
_HOST = "MINDSPEED_DEBUG_HOST"

logger = logging.getLogger(__name__)


def setup_debugpy(host: str = "127.0.0.1", base_port: int = BASE_PORT) -> None:
    """Wait in this rank for a debugger to attach on port base_port + rank.

    MINDSPEED_DEBUG_RANKS limits this to some ranks; MINDSPEED_DEBUG_HOST wins over host.
    """
    rank = environment.rank()
    selected = _selected_ranks()
    if selected is not None and rank not in selected:
        return
    debugpy = _debugpy()
    if debugpy.is_client_connected():
        return
    port = base_port + rank
    _listen(debugpy, os.environ.get(_HOST) or host, port)
    _print_line(f"[Rank {rank}] Waiting for debugger attach on port {port}...")
    debugpy.wait_for_client()
    _print_line(f"[Rank {rank}] Debugger attached!")


def attach_if_asked() -> None:
    """Wait for a debugger if MINDSPEED_DEBUG_RANKS names this rank."""
    if os.environ.get(_RANKS):
        setup_debugpy()


def _selected_ranks() -> set[int] | None:
    given = os.environ.get(_RANKS, "").strip()
    if given in ("", "all"):
        return None
    try:
        ranks = {int(part) for part in given.split(",")}
    except ValueError:
        raise ConfigError(
            f"{_RANKS}={given}: give rank numbers separated by commas, such as 0,2, or all"
        ) from None
    world = environment.world_size()
    outside = sorted(rank for rank in ranks if not 0 <= rank < world)
    if outside:
        raise ConfigError(
            f"{_RANKS}={given}: there is no rank {outside[0]}, this job has ranks 0 to {world - 1}"
        )
    return ranks


def _debugpy() -> ModuleType:
    # Else each rank prints that breakpoints inside Python's own frozen modules may be missed.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    try:
        import debugpy
    except ImportError as error:
        raise RuntimeError(
            "debugging needs debugpy, which is not installed: pip install debugpy"
        ) from error
    return debugpy


def _listen(debugpy: ModuleType, host: str, port: int) -> None:
    if port > 65535:
        raise ConfigError(f"debugger port {port} is above 65535: give a smaller base_port")
    if not _is_loopback(host):
        logger.warning(
            "the debugger listens on %s:%d: anyone who reaches this port can run code here",
            host,
            port,
        )
    try:
        debugpy.listen((host, port))
    except RuntimeError as error:
        if "already been called" in str(error):  # and its client has left: wait for the next one
            return
        raise RuntimeError(
            f"the debugger cannot listen on port {port} of {host}: {error}; end the process that"
            " has the port, or give setup_debugpy another base_port"
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _print_line(line: str) -> None:
    # Written for the user at the terminal, who waits for exactly this line; not a log record.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
