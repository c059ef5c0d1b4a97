"""Ports to listen on, and which addresses the processes of this machine listen on."""

import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

_LISTEN = "0A"
_FIRST_PORT, _PORTS_A_WORKER = 23000, 1000


def free_ports(count: int = 1) -> int:
    """Return the first of some ports in a row that nothing is bound to.

    They lie below the ephemeral ports, which sockets of every other test are given meanwhile, and
    each worker of pytest-xdist has a range of its own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 9
    first = _FIRST_PORT + worker * _PORTS_A_WORKER
    while True:
        port = first + secrets.randbelow(_PORTS_A_WORKER - count)  # another in another session
        if all(map(_is_free, range(port, port + count))):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def listening_addresses(pids: Iterable[int] = ()) -> set[tuple[str, int]]:
    """Return the (address, port) pairs that the given processes (or this one) listen on."""
    if sys.platform != "linux":
        pytest.skip("listening sockets are read from /proc, which only Linux has")
    inodes = {inode for pid in (list(pids) or [os.getpid()]) for inode in _socket_inodes(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                found.add(_address(fields[1]))
    return found


def descendants(pid: int) -> set[int]:
    """Return a process and all that it has started, as far as they still run."""
    found = {pid}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            for child in task.read_text().split():
                found |= descendants(int(child))
    return found


def running(pid: int) -> bool:
    """Return whether a process exists and is not just waiting to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _socket_inodes(pid: int) -> set[str]:
    links = set()
    # Ended meanwhile, or somebody else's.
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                links.add(os.readlink(entry))
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def _address(text: str) -> tuple[str, int]:
    address, port = text.split(":")
    # The kernel prints 32-bit words in the byte order of the machine.
    words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)
