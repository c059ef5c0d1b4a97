"""Blocks worked on by several processes, with the results in the order of the blocks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait

from mindspeed_llm.data.readers import Block
from mindspeed_llm.data.work import DocumentWorker, Encoded, Plan, SampleWorker, make_worker

AHEAD = 2
"""Blocks in work per process: one at hand and one waiting."""

Result = tuple[Block, Encoded]

_worker: DocumentWorker | SampleWorker | None = None
"""The worker of this process, where this process is one of the pool."""


def encode_blocks(plan: Plan, blocks: Iterable[Block], processes: int) -> Iterator[Result]:
    """Yield the blocks in order, each with its tokens; with one process it is this one."""
    if processes == 1:
        worker = make_worker(plan)
        yield from ((block, worker(block)) for block in blocks)
        return
    # Spawned, not forked: a fork copies locks that threads of this process may hold.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start, (plan,)) as pool:
        try:
            yield from _in_order(pool, blocks, processes * AHEAD)
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process ended by itself (was it out of memory?): use fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, blocks: Iterable[Block], ahead: int) -> Iterator[Result]:
    pending: deque[tuple[Block, Future[Encoded]]] = deque()
    for block in blocks:
        pending.append((block, pool.submit(_work, block)))
        if len(pending) >= ahead:
            yield _first(pending)
    while pending:
        yield _first(pending)


def _first(pending: deque[tuple[Block, Future[Encoded]]]) -> Result:
    block, future = pending.popleft()
    return block, future.result()


def _start(plan: Plan) -> None:
    """Make this process a worker that ends when its parent does, however that ends."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    parent = multiprocessing.parent_process()
    if parent is not None:
        watch = threading.Thread(target=_leave_with, args=(parent.sentinel,), daemon=True)
        watch.start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = make_worker(plan)


def _leave_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _work(block: Block) -> Encoded:
    assert _worker is not None
    return _worker(block)
