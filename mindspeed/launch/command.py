"""Run a command as N ranks: the engine of `mindspeed run`."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, BinaryIO

from mindspeed.launch.output import Relay, Tail, error_tail, stacks
from mindspeed.launch.process import die_with_parent, is_suspended
from mindspeed.launch.rendezvous import LOOPBACK, Rendezvous, StoreLost, rank_environment
from mindspeed.launch.supervision import (
    Verdict,
    describe_failure,
    describe_hang,
    describe_unresponsive,
    dump_stacks,
    is_stop_exit_code,
    stop,
    watch,
)


@dataclass(frozen=True)
class Outcome:
    """Exit code and report of a job."""

    exit_code: int
    summary: str = ""
    detail: str = ""


class _Interrupted(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


class _Interrupts:
    """Records SIGINT, SIGTERM and SIGHUP, to be raised where the ranks can be stopped in order."""

    def __init__(self) -> None:
        self._number = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "_Interrupts":
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._number = number

    def check(self) -> None:
        """Raise the recorded signal, once."""
        number, self._number = self._number, 0
        if number:
            raise _Interrupted(number)


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

    def is_suspended(self) -> bool:
        return is_suspended(self.process.pid)

    def failed_at(self) -> float:
        return self._ended_at

    def error_tail(self) -> str:
        return error_tail(self.tail.text())

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
    """Run command in nproc processes until all end; a failure or the time-out ends all of them."""
    deadline = None if timeout is None else time.monotonic() + timeout
    ranks: list[_CommandRank] = []
    asked = False
    try:
        with _Interrupts() as interrupts, Rendezvous(host) as rendezvous, Relay() as relay:

            def pump(seconds: float) -> None:
                relay.pump(seconds)
                interrupts.check()
                rendezvous.check()

            try:
                for rank in range(nproc):
                    environment = rank_environment(rank, nproc, host=host, port=rendezvous.port)
                    ranks.append(_start(command, rank, environment))
                for started in ranks:
                    _follow(started, relay, all_ranks)
                rendezvous.serve_apart()
                return _judge(watch(ranks, pump, deadline), ranks, relay, timeout)
            except _Interrupted:
                asked = True
                raise
            finally:
                stop(ranks, pump, patient=asked)
    except StoreLost as error:
        return Outcome(1, str(error))
    except _Interrupted as interrupt:
        name = signal.Signals(interrupt.number).name
        return Outcome(128 + interrupt.number, f"stopped by {name}; all ranks have ended")


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
    verdict: Verdict[_CommandRank],
    ranks: Sequence[_CommandRank],
    relay: Relay,
    timeout: float | None,
) -> Outcome:
    if verdict == Verdict():
        return Outcome(0)
    relay.muted = True  # what follows comes in the outcome, one rank after the other
    if verdict.hung:
        dump_stacks(verdict.hung, relay.pump)
        dumps = [_prefixed(rank.rank, stacks(rank.tail.text())) for rank in verdict.hung]
        return Outcome(1, describe_hang(verdict.hung, ranks, timeout), "\n".join(dumps))
    if verdict.unresponsive:
        return Outcome(1, describe_unresponsive(verdict.unresponsive, ranks))
    failed = verdict.failed
    code = None if failed is None else failed.exit_code()
    assert failed is not None and code is not None
    if is_stop_exit_code(code):
        return Outcome(code, describe_failure(failed, ranks))
    if code == 2:
        # Rank 0 is shown as it runs: its own report of the same mistake is already on the screen.
        return Outcome(2, detail="" if ranks[0].exit_code() == 2 else failed.error_tail())
    summary = describe_failure(failed, ranks)
    if failed.rank == 0:
        return Outcome(1, f"{summary}; its output is above")
    return Outcome(1, summary, _prefixed(failed.rank, failed.error_tail()))


def _prefixed(rank: int, text: str) -> str:
    return "\n".join(f"[rank {rank}] {line}" for line in text.splitlines())
