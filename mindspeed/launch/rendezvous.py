"""The store through which ranks find each other, on a socket that we bind ourselves."""

import socket
import subprocess
import sys
from typing import Any

from mindspeed.config import ConfigError
from mindspeed.launch.environment import LOOPBACK
from mindspeed.launch.process import ignore_requests_to_stop

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
        """Answer the ranks from this process."""
        self._store = _open_store(self.host, self.port, self._socket.detach())

    def serve_apart(self) -> None:
        """Answer the ranks from a process of its own: this one need not load torch.

        Ranks that connect before it is up wait in the queue of the socket.
        """
        descriptor = self._socket.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, self.host, str(self.port), str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.PIPE,  # its end tells the process that we are gone
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us
            preexec_fn=ignore_requests_to_stop,  # it ends with its standard input
        )
        self._socket.close()

    def check(self) -> None:
        """Raise StoreLost if nobody answers the ranks any more."""
        code = self._process.poll() if self._process else None
        if code is not None:
            raise StoreLost(f"the store through which the ranks meet ended with exit code {code}")

    def __enter__(self) -> "Rendezvous":
        return self

    def __exit__(self, *error: object) -> None:
        self._store = None
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


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
    del store  # it has answered until here
