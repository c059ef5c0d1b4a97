"""Watch ranks, find the one that failed first, explain a hang, and leave nothing running."""

import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

# Waits up to the given seconds for the ranks' output or end, and takes in what has arrived.
Pump = Callable[[float], None]

_TICK = 0.05
_SETTLE = 0.3
_DUMP_TIME = 3.0
_GRACE = 5.0

# What a healthy rank reports when a peer is gone. Such a rank is not the one to blame.
_PEER_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|recvValue failed|remote process exited"
    r"|[Rr]emote ?[Ee]rror|heartbeat|Socket Timeout|Timed out waiting"
)


class Rank(Protocol):
    """One running rank, whatever started it."""

    rank: int

    def exit_code(self) -> int | None:
        """Return None while it runs, else its exit code (minus the signal that killed it)."""

    def failed_at(self) -> float:
        """Return the monotonic time of the failure."""

    def last_words(self) -> str:
        """Return the last lines it wrote, from its traceback on if there is one."""

    def signal(self, number: int) -> None:
        """Send a signal to the rank and to what it started; one that is gone is no error."""


@dataclass(frozen=True)
class Verdict:
    """How a job ended: `failed` names the rank to blame, `hung` those that ran out of time."""

    failed: Rank | None = None
    hung: tuple[Rank, ...] = ()


def watch(ranks: Sequence[Rank], pump: Pump, timeout: float | None) -> Verdict:
    """Wait until every rank has ended well, one has failed, or the time is over."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        pump(_TICK)
        if any(rank.exit_code() for rank in ranks):
            return Verdict(failed=_first_failure(ranks, pump))
        running = tuple(rank for rank in ranks if rank.exit_code() is None)
        if not running:
            return Verdict()
        if deadline is not None and time.monotonic() > deadline:
            return Verdict(hung=running)


def _first_failure(ranks: Sequence[Rank], pump: Pump) -> Rank:
    # Ranks that lost their peer die within milliseconds of it, sometimes before it is gone itself, so
    # look at all that fail together. A wrong configuration (2) is reported by every rank: wait for them.
    usage = any(rank.exit_code() == 2 for rank in ranks)
    _wait(ranks, pump, _GRACE if usage else _SETTLE)
    failed = [rank for rank in ranks if rank.exit_code()]
    return min(failed, key=lambda r: (bool(_PEER_LOST.search(r.last_words())), r.failed_at()))


def dump_stacks(ranks: Sequence[Rank], pump: Pump) -> None:
    """Make hanging ranks write the Python stack of every thread to their output, and die of it."""
    for rank in ranks:
        rank.signal(signal.SIGABRT)
    _wait(ranks, pump, _DUMP_TIME)


def stop(ranks: Sequence[Rank], pump: Pump, grace: float = _GRACE) -> None:
    """End every rank: politely, then, after the grace time or a second interrupt, for good."""
    try:
        running = [rank for rank in ranks if rank.exit_code() is None]
        for rank in running:
            rank.signal(signal.SIGTERM)
        _wait(running, pump, grace)
    finally:
        for rank in ranks:
            rank.signal(signal.SIGKILL)
        _wait(ranks, pump, grace)


def describe_exit(code: int) -> str:
    """Put an exit code or a deadly signal into words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (is the machine out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _wait(ranks: Sequence[Rank], pump: Pump, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(rank.exit_code() is None for rank in ranks) and time.monotonic() < deadline:
        pump(_TICK)
    pump(0.0)
