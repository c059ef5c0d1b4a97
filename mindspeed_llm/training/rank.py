"""One process as one rank of a run: who speaks, and how it ends."""

import logging
import os
import sys
from collections.abc import Callable

from mindspeed.config import ConfigError

logger = logging.getLogger(__name__)

FAILED, MISUSE = 1, 2


def run_rank(train: Callable[[], None]) -> int:
    """Train and return the exit code; what concerns all ranks is told once a machine."""
    is_first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(
        format="%(message)s",
        level=logging.INFO if is_first else logging.ERROR,
        stream=sys.stdout,
    )
    logging.getLogger("megatron").setLevel(logging.WARNING if is_first else logging.ERROR)
    try:
        train()
    except ConfigError:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            raise
        return MISUSE
    finally:
        _leave()
    return 0


def _leave() -> None:
    """Leave the other ranks in order."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
