"""Blocks worked on by several processes, with the results in the order of the blocks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial

from mindspeed.launch.process import leave_with_parent
from mindspeed_llm.data.readers import Block
from mindspeed_llm.data.work import Encoded, Plan, Worker, make_worker

AHEAD = 2
"""Blocks in work per process: one at hand and one waiting."""
TOKENIZER_THREADS = "TOKENIZERS_PARALLELISM"

Result = tuple[Block, Encoded]

_worker: Worker | None = None
"""The worker of this process, where this process is one of the pool."""


def encode_blocks(
    plan: Plan, blocks: Iterable[Block], processes: int, let_go: Callable[[], None]
) -> Generator[Result, None, None]:
    """Yield the blocks in order, each with its tokens; with one process it is this one.

    A worker that is a copy of this process calls `let_go`: it gives up what only one may hold.
    """
    if processes == 1:
        worker = make_worker(plan)
        yield from ((block, worker(block)) for block in blocks)
        return
    with _no_threads_in_tokenizers():
        pool = _make_pool(plan, processes, let_go)
        try:
            yield from _in_order(pool, blocks, processes * AHEAD)
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process ended by itself (was it out of memory?): use fewer --workers"
            ) from None
        except BaseException:  # whoever interrupts does not want the blocks in work any more
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _make_pool(plan: Plan, processes: int, let_go: Callable[[], None]) -> ProcessPoolExecutor:
    if _is_alone():
        worker = make_worker(plan)  # loaded and checked once, for all
        copies = multiprocessing.get_context("fork")
        return ProcessPoolExecutor(processes, copies, _start, (lambda: worker, let_go))
    fresh = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, fresh, _start, (partial(make_worker, plan), None))


def _is_alone() -> bool:
    """Tell whether this process can be copied: no other thread holds a lock the copy would miss.

    torch has threads that Python does not know of.
    """
    one_thread = threading.active_count() == 1 and "torch" not in sys.modules
    return one_thread and sys.platform == "linux"


@contextmanager
def _no_threads_in_tokenizers() -> Iterator[None]:
    """Let tokenizers work in the calling thread: the processes are the parallelism."""
    before = os.environ.get(TOKENIZER_THREADS)
    os.environ[TOKENIZER_THREADS] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[TOKENIZER_THREADS]
        else:
            os.environ[TOKENIZER_THREADS] = before


def _in_order(pool: ProcessPoolExecutor, blocks: Iterable[Block], ahead: int) -> Iterator[Result]:
    pending: deque[tuple[Block, Future[Encoded]]] = deque()
    for block in blocks:
        with _interrupts_later():
            pending.append((block, pool.submit(_work, block)))
        if len(pending) >= ahead:
            yield _first(pending)
    while pending:
        yield _first(pending)


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Keep an interrupt from the processes that begin here, until they ignore it by themselves."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _first(pending: deque[tuple[Block, Future[Encoded]]]) -> Result:
    block, future = pending.popleft()
    return block, future.result()


def _start(get_worker: Callable[[], Worker], let_go: Callable[[], None] | None) -> None:
    """Make this process a worker that ends when its parent does, however that ends."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if let_go is not None:
        let_go()
    leave_with_parent()
    _worker = get_worker()
    gc.freeze()  # what is there now stays: looking through it again and again costs a tenth


def _work(block: Block) -> Encoded:
    assert _worker is not None
    return _worker(block)
