"""How ranks find each other: the store, on a socket that we bind ourselves, and the environment."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from mindspeed.config import ConfigError
from mindspeed.launch.process import ignore_stop_signals

LOOPBACK = "127.0.0.1"

# Each communication library opens sockets of its own beside the store, on an interface it picks by
# itself unless its variable names one.
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
_SERVE = "from mindspeed.launch.rendezvous import _serve_until_eof as serve; serve()"


class StoreLost(RuntimeError):
    """The process that serves the store has ended before the ranks."""


class Rendezvous:
    """A TCPStore on one address: by itself torch's store would listen on every interface."""

    def __init__(self, host: str = LOOPBACK) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, 0), family=family, backlog=1024)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"cannot listen on {host} ({reason}): give an address of this machine"
            ) from error
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self._store: Any = None
        self._process: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        """Serve the store from this process."""
        self._store = _open_store(self.host, self.port, self._socket.detach())

    def serve_apart(self) -> None:
        """Serve the store from a process of its own: this one need not load torch.

        Ranks that connect before it is up wait in the queue of the socket.
        """
        descriptor = self._socket.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, self.host, str(self.port), str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.PIPE,  # its end of file means that we are gone
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us
            preexec_fn=ignore_stop_signals,  # it ends with its standard input
        )
        self._socket.close()

    def check(self) -> None:
        """Raise StoreLost if the process that serves the store has ended."""
        code = self._process.poll() if self._process else None
        if code is not None:
            raise StoreLost(f"the rendezvous store of the ranks ended with exit code {code}")

    def __enter__(self) -> "Rendezvous":
        return self

    def __exit__(self, *error: object) -> None:
        self._store = None
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


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


def _open_store(host: str, port: int, descriptor: int) -> Any:
    import torch.distributed

    # The store owns the descriptor from here on.
    return torch.distributed.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )


def _serve_until_eof() -> None:
    host, port, descriptor = sys.argv[1:]
    store = _open_store(host, int(port), int(descriptor))
    sys.stdin.read()
    del store  # it has served until here
