"""Watch ranks, find the one that failed first, explain a hang, and leave no process running."""

import logging
import math
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

# Waits up to the given seconds for the ranks' output or end, and takes in what has arrived.
Pump = Callable[[float], None]

_TICK = 0.05
_SETTLE = 0.3
_DUMP_TIME = 3.0
_GRACE = 5.0

# What a healthy rank reports when a peer is gone. Such a rank is not the one to blame.
_PEER_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|recvValue failed|remote process exited"
    r"|[Rr]emote ?[Ee]rror|heartbeat|Socket Timeout|Timed out waiting|collective operation timeout"
    r"|caused pair closure"
)
_TIMED_OUT = re.compile(
    r"Socket Timeout|Timed out waiting|collective operation timeout|caused pair closure"
)


class Rank(Protocol):
    """One running rank, whatever started it."""

    rank: int

    def exit_code(self) -> int | None:
        """Return None while it runs, else its exit code (minus the signal that killed it)."""

    def is_suspended(self) -> bool:
        """Return whether SIGSTOP, or a debugger, keeps it from running."""

    def failed_at(self) -> float:
        """Return the monotonic time of the failure."""

    def error_tail(self) -> str:
        """Return the last lines it wrote, from its traceback on if there is one."""

    def signal(self, number: int) -> None:
        """Send a signal to the rank and its children; one that has ended is no error."""


R = TypeVar("R", bound=Rank)


@dataclass(frozen=True)
class Verdict(Generic[R]):
    """How a job ended: `failed` is the rank to blame, `hung` are those that ran out of time.

    `unresponsive` are those that did not respond to the others, which timed out.
    """

    failed: R | None = None
    hung: tuple[R, ...] = ()
    unresponsive: tuple[R, ...] = ()


def watch(ranks: Sequence[R], pump: Pump, deadline: float | None) -> Verdict[R]:
    """Wait until every rank has ended well, one has failed, or the deadline (monotonic) is over."""
    while True:
        pump(_TICK)
        codes = [rank.exit_code() for rank in ranks]  # once: a rank may fail between two looks
        if any(codes):
            return _blame(ranks, pump)
        running = tuple(rank for rank, code in zip(ranks, codes) if code is None)
        if not running:
            pump(0.0)  # what they wrote between the last poll and their end
            return Verdict()
        if deadline is not None and time.monotonic() > deadline:
            return Verdict(hung=running)


def _blame(ranks: Sequence[R], pump: Pump) -> Verdict[R]:
    # A rank that lost its peer dies milliseconds after it, or even before it is quite gone: judge
    # all that fail together. A wrong configuration (2) is reported by every rank: wait for them.
    usage = any(rank.exit_code() == 2 for rank in ranks)
    _wait(ranks, pump, _GRACE if usage else _SETTLE)
    failed = [rank for rank in ranks if rank.exit_code()]
    if all(map(_lost_peer, failed)):  # the cause is another rank, which may take longer to end
        _wait(_awake(ranks), pump, _GRACE)
        failed = [rank for rank in ranks if rank.exit_code()]
        running = tuple(rank for rank in ranks if rank.exit_code() is None)
        suspended = tuple(rank for rank in running if rank.is_suspended())
        if suspended or running and all(map(_timed_out, failed)):
            return Verdict(unresponsive=suspended or running)
    return Verdict(failed=min(failed, key=lambda rank: (_lost_peer(rank), rank.failed_at())))


def dump_stacks(ranks: Sequence[Rank], pump: Pump) -> None:
    """Make hanging ranks write the stack of every thread to their output, which ends them."""
    for rank in ranks:
        rank.signal(signal.SIGABRT)
    _wait(ranks, pump, _DUMP_TIME)


def stop(ranks: Sequence[Rank], pump: Pump, patient: bool = False) -> None:
    """End every rank: politely, then, after the grace time or a second interrupt, for good.

    Patient: no time is set to ranks that do something before they end, such as save.
    """
    try:
        running = [rank for rank in ranks if rank.exit_code() is None]
        for rank in running:
            rank.signal(signal.SIGTERM)
        _wait(_awake(running), pump, _GRACE)
        running = [rank for rank in running if rank.exit_code() is None]
        if running and patient:
            logger.warning("waiting for %s to end; a second Ctrl-C kills", _names(running))
            _wait(running, pump, math.inf)
    finally:
        for rank in ranks:
            rank.signal(signal.SIGKILL)
        _wait(ranks, pump, _GRACE)


def describe_failure(failed: Rank, ranks: Sequence[Rank]) -> str:
    """Return one line on which rank failed and how."""
    ended = [rank for rank in ranks if rank.exit_code() == 0]
    # Then the failure is often just that: a rank that left its loop one step before the others.
    early = f"; {_names(ended)} had already ended without an error" if ended else ""
    return f"rank {failed.rank} of {len(ranks)} {_describe_exit(failed.exit_code() or 0)}{early}"


def describe_hang(hung: Sequence[Rank], ranks: Sequence[Rank], timeout: float | None) -> str:
    """Return one line on which ranks ran out of time."""
    return f"time-out after {timeout:g} s with {_names(hung)} of {len(ranks)} still running"


def describe_unresponsive(unresponsive: Sequence[Rank], ranks: Sequence[Rank]) -> str:
    """Return one line on the ranks that the others waited for until they timed out."""
    verb = "is" if len(unresponsive) == 1 else "are"
    why = f" and {verb} suspended (SIGSTOP or a debugger)" if unresponsive[0].is_suspended() else ""
    names = f"{_names(unresponsive)} of {len(ranks)}"
    return f"{names} did not answer within the time-out of the others{why}"


def _names(ranks: Sequence[Rank]) -> str:
    numbers = ", ".join(str(rank.rank) for rank in ranks)
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _describe_exit(code: int) -> str:
    if is_stop_exit_code(code):
        return f"stopped before its last step (exit code {code}: {_signal_name(code - 128)})"
    if code >= 0:
        return f"ended with exit code {code}"
    name = _signal_name(-code)
    hint = " (is the machine out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def is_stop_exit_code(code: int | None) -> bool:
    """Return whether an exit code means that a rank was asked to stop and did so in order."""
    return code in (128 + signal.SIGINT, 128 + signal.SIGTERM)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _lost_peer(rank: Rank) -> bool:
    return _PEER_LOST.search(rank.error_tail()) is not None


def _awake(ranks: Sequence[R]) -> list[R]:
    return [rank for rank in ranks if not rank.is_suspended()]


def _timed_out(rank: Rank) -> bool:
    return _TIMED_OUT.search(rank.error_tail()) is not None


def _wait(ranks: Sequence[Rank], pump: Pump, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(rank.exit_code() is None for rank in ranks) and time.monotonic() < deadline:
        pump(_TICK)
    pump(0.0)
