"""The clients that are checked, each with the pinned packages that its folder holds."""

from dataclasses import dataclass

DEFAULT_CORE = "0.16.1"


@dataclass(frozen=True)
class Client:
    """One project that drives Megatron, with what it needs beside the environment of `make setup`.

    `requirements` are installed without their dependencies, so every package that the environment
    lacks is listed; one that it has in another version may be listed too and wins. Never torch.
    """

    name: str
    requirements: tuple[str, ...]
    cores: tuple[str, ...] = (DEFAULT_CORE,)
    """The versions of megatron-core that it is checked with."""

    @property
    def module(self) -> str:
        """The module that holds its CASES and OWN failures."""
        return f"tests.clients.check_{self.name.replace('-', '_')}"


CLIENTS = (
    Client("mcore-bridge", ("mcore-bridge==1.6.5",)),
    Client("megatron-bridge", ("megatron-bridge==0.3.1",)),
    Client("mbridge", ("mbridge==0.15.1",)),
    Client("ms-swift", ("ms-swift==4.6.0", "mcore-bridge==1.6.5")),
    Client("verl", ("verl==0.9.1", "mbridge==0.15.1")),
)
