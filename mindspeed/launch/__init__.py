"""Start N ranks on this machine, supervise them, and report the one that failed first."""

from mindspeed.launch.command import Outcome, launch
from mindspeed.launch.functions import RankFailed, call
from mindspeed.launch.rendezvous import (
    LOOPBACK,
    Rendezvous,
    loopback_interface,
    rank_environment,
)

__all__ = [
    "LOOPBACK",
    "Outcome",
    "RankFailed",
    "Rendezvous",
    "call",
    "launch",
    "loopback_interface",
    "rank_environment",
]
