"""Run a Python function as N ranks, each in a fresh process that starts in milliseconds."""

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mindspeed.launch.output import error_tail, stacks
from mindspeed.launch.process import die_with_parent, is_suspended
from mindspeed.launch.rendezvous import LOOPBACK, Rendezvous, rank_environment
from mindspeed.launch.supervision import (
    Pump,
    Verdict,
    describe_failure,
    describe_hang,
    describe_unresponsive,
    dump_stacks,
    stop,
    watch,
)


class RankFailed(RuntimeError):
    """A rank raised, died or hung: `rank` is its number, `traceback` shows where."""

    def __init__(self, rank: int, reason: str, where: str) -> None:
        super().__init__(f"{reason}\n{where}")
        self.rank = rank
        self.traceback = where


class _FunctionRank:
    def __init__(self, rank: int, process: Any, pipe: Connection, log: Path) -> None:
        self.rank = rank
        self.process = process
        self.value: Any = None
        self.result_pipe: Connection | None = pipe
        self._log = log
        self._error = ""
        self._failed_at = 0.0

    def receive(self) -> None:
        assert self.result_pipe is not None
        try:
            self.value, self._error, self._failed_at = pickle.loads(self.result_pipe.recv_bytes())
        except EOFError:
            self._close()
        else:
            self.result_pipe.close()
            self.result_pipe = None

    def _close(self) -> None:
        """Wait for no result any more: the rank died before it could send one."""
        assert self.result_pipe is not None
        self._failed_at = time.monotonic()
        self.result_pipe.close()
        self.result_pipe = None

    def exit_code(self) -> int | None:
        # The result is written before the exit; until it has been read the rank counts as running.
        # No end of the pipe is waited for: what the rank has forked may hold it open for ever.
        code: int | None = self.process.exitcode
        if code is not None and self.result_pipe is not None and not self.result_pipe.poll():
            self._close()
        return code if self.result_pipe is None else None

    def is_suspended(self) -> bool:
        return is_suspended(self.process.pid)

    def failed_at(self) -> float:
        return self._failed_at

    def error_tail(self) -> str:
        return self._error or error_tail(self.output())

    def output(self) -> str:
        """Return all that the rank has written."""
        return self._log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        if self.process.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


def call(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    timeout: float,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Call function(*arguments) in world ranks and return what each returned, by rank.

    The processes are forked from a server that has imported the preload modules once.
    """
    deadline = time.monotonic() + timeout
    multiprocessing.set_forkserver_preload(list(preload))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, Rendezvous() as rendezvous:
        rendezvous.serve()
        work = pickle.dumps((function, arguments))
        ranks: list[_FunctionRank] = []
        pump = partial(_pump, ranks)
        try:
            for rank in range(world):
                environment = rank_environment(rank, world, host=LOOPBACK, port=rendezvous.port)
                ranks.append(_start(rank, environment, work, Path(folder, f"{rank}.log")))
            _raise_failure(watch(ranks, pump, deadline), ranks, pump, timeout)
            return [rank.value for rank in ranks]
        finally:
            stop(ranks, pump)
            sys.stdout.write("".join(rank.output() for rank in ranks))


def _start(rank: int, environment: dict[str, str], work: bytes, log: Path) -> _FunctionRank:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    log.touch()
    process = context.Process(target=_serve_rank, args=(environment, work, sender, str(log)))
    process.start()
    sender.close()
    return _FunctionRank(rank, process, receiver, log)


def _serve_rank(environment: dict[str, str], work: bytes, results: Connection, log: str) -> None:
    die_with_parent(os.getppid())()
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    try:
        function, arguments = pickle.loads(work)
        results.send_bytes(pickle.dumps((function(*arguments), "", 0.0)))
    except BaseException:
        results.send_bytes(pickle.dumps((None, traceback.format_exc(), time.monotonic())))
        results.close()
        sys.exit(1)


def _pump(ranks: Sequence[_FunctionRank], seconds: float) -> None:
    waiting = {rank.result_pipe: rank for rank in ranks if rank.result_pipe is not None}
    ending = [rank.process.sentinel for rank in ranks if rank.process.exitcode is None]
    for ready in multiprocessing.connection.wait([*waiting, *ending], seconds):
        if ready in waiting:
            waiting[ready].receive()


def _raise_failure(
    verdict: Verdict[_FunctionRank], ranks: Sequence[_FunctionRank], pump: Pump, timeout: float
) -> None:
    if verdict.hung:
        dump_stacks(verdict.hung, pump)
        where = "\n".join(f"rank {rank.rank}:\n{stacks(rank.output())}" for rank in verdict.hung)
        raise RankFailed(verdict.hung[0].rank, describe_hang(verdict.hung, ranks, timeout), where)
    if verdict.unresponsive:
        unresponsive = verdict.unresponsive
        raise RankFailed(unresponsive[0].rank, describe_unresponsive(unresponsive, ranks), "")
    if verdict.failed is not None:
        failed = verdict.failed
        raise RankFailed(failed.rank, describe_failure(failed, ranks), failed.error_tail())
