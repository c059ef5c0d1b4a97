"""The store through which ranks find each other, on a socket that we bind ourselves."""

import socket
from types import TracebackType
from typing import Any

from mindspeed.config import ConfigError
from mindspeed.launch.environment import LOOPBACK


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

    def serve(self) -> None:
        """Answer the ranks; those that connected earlier wait in the queue of the socket."""
        import torch.distributed

        # The store owns and closes the descriptor from here on.
        self._store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
        )

    def __enter__(self) -> "Rendezvous":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._store = None
        self._socket.close()
