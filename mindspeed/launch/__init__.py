"""Start N ranks on this machine, keep them together, and say which one failed first."""

from mindspeed.launch.command import Outcome, launch
from mindspeed.launch.environment import LOOPBACK, loopback_interface, rank_environment
from mindspeed.launch.functions import RankFailed, call
from mindspeed.launch.rendezvous import Rendezvous

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
