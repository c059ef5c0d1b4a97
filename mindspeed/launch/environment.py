"""The environment variables that tell a process which rank it is."""

import os
import re
import socket
from collections.abc import Mapping

LOOPBACK = "127.0.0.1"

# Each communication library opens sockets of its own beside the store, on an interface it picks by
# itself unless its variable names one.
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")


def loopback_interface() -> str | None:
    """Name the loopback network interface of this machine (`lo`, `lo0`, ...), if it has one."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if re.fullmatch(r"lo\d*", name)), None)


def rank_environment(
    rank: int, world: int, *, host: str, port: int, inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the complete environment of one rank whose store listens on host:port."""
    environment = dict(os.environ if inherited is None else inherited)
    interface = loopback_interface()
    if host == LOOPBACK and interface is not None:
        for name in _INTERFACE_VARIABLES:
            environment.setdefault(name, interface)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    # On SIGABRT, and on a crash, Python then writes the stack of every thread: it explains a hang.
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    # Output reaches us in the order it was written, and the last lines survive a crash.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR=LOOPBACK if host in ("0.0.0.0", "::") else host,
        MASTER_PORT=str(port),
        # env:// then makes every rank a client; otherwise rank 0 would open a store of its own, on
        # all interfaces.
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    return environment
