"""Run a command as N ranks: the engine of `mindspeed run`."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import BinaryIO

from mindspeed.launch.environment import LOOPBACK, rank_environment
from mindspeed.launch.output import Relay, Tail
from mindspeed.launch.process import die_with_parent
from mindspeed.launch.rendezvous import Rendezvous
from mindspeed.launch.supervision import Verdict, describe_exit, dump_stacks, stop, watch


@dataclass(frozen=True)
class Outcome:
    """What the launcher's caller should exit with and say."""

    exit_code: int
    message: str = ""


class _Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


class _CommandRank:
    def __init__(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        self.rank = rank
        self.process = process
        self.tail = Tail()
        self._ended_at = 0.0

    def exit_code(self) -> int | None:
        code = self.process.poll()
        if code is not None and not self._ended_at:
            self._ended_at = time.monotonic()
        return code

    def failed_at(self) -> float:
        return self._ended_at

    def last_words(self) -> str:
        return self.tail.text()

    def signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):  # macOS: a group of zombies only
            pass


def launch(
    command: Sequence[str],
    nproc: int,
    *,
    timeout: float | None = None,
    all_ranks: bool = False,
    host: str = LOOPBACK,
) -> Outcome:
    """Run command in nproc processes until all end; the first failure or the time-out ends them all."""
    ranks: list[_CommandRank] = []
    relay = Relay()
    try:
        with _interruptible(), Rendezvous(host) as rendezvous:
            try:
                for rank in range(nproc):
                    environment = rank_environment(rank, nproc, host=host, port=rendezvous.port)
                    ranks.append(_start(command, rank, environment))
                for started in ranks:
                    _follow(started, relay, all_ranks)
                # Importing torch takes a second or two, which the ranks need for the same import.
                rendezvous.serve()
                verdict = watch(ranks, relay.pump, timeout)
                return _judge(verdict, ranks, relay, timeout)
            finally:
                stop(ranks, relay.pump)
    except _Interrupted as interrupt:
        name = signal.Signals(interrupt.number).name
        return Outcome(128 + interrupt.number, f"stopped by {name}; all ranks have ended")
    finally:
        relay.close()


def _start(command: Sequence[str], rank: int, environment: dict[str, str]) -> _CommandRank:
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=None if rank == 0 else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # one group per rank: a signal reaches what the rank itself started
        preexec_fn=die_with_parent(os.getpid()),
    )
    return _CommandRank(rank, process)


def _follow(rank: _CommandRank, relay: Relay, all_ranks: bool) -> None:
    shown = rank.rank == 0 or all_ranks
    prefix = f"[rank {rank.rank}] " if all_ranks else ""
    pairs = ((rank.process.stdout, sys.stdout), (rank.process.stderr, sys.stderr))
    for pipe, stream in pairs:
        sink: BinaryIO | None = stream.buffer if shown else None
        assert pipe is not None
        relay.add(pipe, rank.tail, sink, prefix)  # type: ignore[arg-type]


def _judge(
    verdict: Verdict, ranks: Sequence[_CommandRank], relay: Relay, timeout: float | None
) -> Outcome:
    if verdict.hung:
        return Outcome(1, _explain_hang(verdict, ranks, relay, timeout))
    failed = verdict.failed
    if failed is None:
        return Outcome(0)
    code = failed.exit_code() or 0
    if code == 2:
        # Rank 0 has been shown as it ran, so its own report of the same mistake is already on the screen.
        return Outcome(2, "" if ranks[0].exit_code() == 2 else failed.last_words())
    relay.muted = True
    summary = f"rank {failed.rank} of {len(ranks)} {describe_exit(code)}; the others were stopped"
    if failed.rank == 0:
        return Outcome(1, f"{summary}; its output is above")
    return Outcome(1, f"{_prefixed(failed.rank, failed.last_words())}\n{summary}")


def _explain_hang(
    verdict: Verdict, ranks: Sequence[_CommandRank], relay: Relay, timeout: float | None
) -> str:
    relay.muted = True  # the stacks come in the message, one rank after the other
    for rank in ranks:
        rank.tail.clear()
    dump_stacks(verdict.hung, relay.pump)
    stacks = [_prefixed(rank.rank, rank.last_words()) for rank in verdict.hung]
    names = ", ".join(str(rank.rank) for rank in verdict.hung)
    summary = f"time-out after {timeout:g} s: still running: rank {names} of {len(ranks)}"
    return "\n".join([*stacks, f"{summary}; where each was is shown above; all were stopped"])


def _prefixed(rank: int, text: str) -> str:
    return "\n".join(f"[rank {rank}] {line}" for line in text.splitlines())


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into an exception, so that the ranks are stopped first."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Interrupted(number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
