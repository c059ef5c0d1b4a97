"""Workers: encode blocks of records, in this process or in a pool, results in order."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from mindspeed.launch.process import exit_with_parent
from mindspeed_llm.data.chat import Piece
from mindspeed_llm.data.conversation import MalformedRecord, UnusableRecord
from mindspeed_llm.data.handlers import HANDLERS, PRETRAIN
from mindspeed_llm.data.handlers.base import as_text, check_media
from mindspeed_llm.data.indexed import Array, smallest_dtype
from mindspeed_llm.data.plan import Plan, make_chat, make_encoder, make_handler
from mindspeed_llm.data.readers import Block, Problem, read
from mindspeed_llm.data.samples import Assembler, Batch, Sequences, shorten
from mindspeed_llm.data.summary import BlockCounts, too_long_reason

CHECKED_FIRST, CHECKED_LATER = 50_000, 250
"""Characters of the first and of later blocks on which the accelerator is compared."""
AHEAD = 2
"""Blocks in work per process: one at hand and one waiting."""
TOKENIZER_THREADS = "TOKENIZERS_PARALLELISM"


@dataclass
class Encoded:
    """A block: its tokens, by the `track` of the files to write, and what became of its records."""

    lines: int
    counts: BlockCounts
    tracks: list[Sequences] = field(default_factory=list)
    stopped: tuple[int, str] | None = None
    """The line of the record that ends the run, with the reason and what to do."""


def make_worker(plan: Plan) -> Worker:
    """Build the worker of a plan."""
    return DocumentWorker(plan) if plan.handler == PRETRAIN else SampleWorker(plan)


class Worker(ABC):
    """What both kinds of workers share: reading, and what to do with malformed records."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._encoder = make_encoder(plan)
        self._to_check = CHECKED_FIRST

    @abstractmethod
    def __call__(self, block: Block) -> Encoded:
        """Encode one block."""

    def _records(self, block: Block, encoded: Encoded) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the records of a block; malformed lines are counted or end the block."""
        rows, encoded.lines = read(block)
        for line, record in rows:
            encoded.counts.records += 1
            problem = self._problem(record)
            if problem is None:
                yield line, record  # type: ignore[misc]
            elif self._refuse(encoded, line, problem):
                return

    def _problem(self, record: dict[str, Any] | Problem) -> str | None:
        if isinstance(record, Problem):
            return record.reason
        try:
            check_media(record, self._plan.columns.media)
        except MalformedRecord as error:
            return str(error)
        return None

    def _refuse(self, encoded: Encoded, line: int, reason: str) -> bool:
        """Count a malformed record, or stop at it and return True."""
        if self._plan.skip_malformed:
            encoded.counts.malformed.append((line, reason))
            return False
        advice = "correct it, or leave such records out with --on-bad-line skip"
        encoded.stopped = (line, f"{reason}; {advice}")
        return True

    def _check(self, texts: Iterable[str]) -> None:
        """Compare the accelerator on some of this block: more on the first, a little on others."""
        left, samples = self._to_check, []
        for text in texts:
            samples.append(text[:left])
            left -= len(samples[-1])
            if left <= 0:
                break
        if samples:
            self._encoder.check(samples)
            self._to_check = CHECKED_LATER


class DocumentWorker(Worker):
    """Encodes plain documents, a column a file."""

    def __call__(self, block: Block) -> Encoded:
        """Encode one block."""
        encoded = Encoded(0, BlockCounts())
        texts: dict[str, list[str]] = {key: [] for key in self._plan.keys}
        lines: list[int] = []
        for line, record in self._records(block, encoded):
            try:
                found = [self._document(record, key) for key in self._plan.keys]
            except MalformedRecord as error:
                if self._refuse(encoded, line, str(error)):
                    break
                continue
            lines.append(line)
            for key, text in zip(self._plan.keys, found):
                texts[key].append(text)
        encoded.counts.written = len(lines)
        for documents in texts.values():
            self._check(islice(documents, len(documents) // 2, None))
            encoded.tracks.append(self._encode(documents, lines, encoded.counts))
        return encoded

    def _document(self, record: dict[str, Any], key: str) -> str:
        if key not in record:
            raise MalformedRecord(f"has no {key}; it has {', '.join(record)}")
        return as_text(record[key], key)

    def _encode(self, texts: list[str], lines: list[int], counts: BlockCounts) -> Sequences:
        """Encode documents as Megatron stores them: an empty one has no sequence but a border."""
        facts = self._plan.facts
        ids = self._encoder.encode(texts)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        full = lengths > 0
        dtype = smallest_dtype(facts.size)
        if self._plan.append_eod:
            final = np.array([facts.eos_id], dtype)
            ids = [part for one in ids if len(one) for part in (one, final)]
            lengths[full] += 1
        tokens = np.concatenate([*ids, np.zeros(0, dtype)], dtype=dtype, casting="unsafe")
        if len(lengths):
            place = int(lengths.argmax())
            counts.measure(int(lengths[place]), lines[place])
        counts.tokens += len(tokens)
        counts.learnt += len(tokens)
        return Sequences(tokens, lengths[full], np.cumsum(full))


class SampleWorker(Worker):
    """Encodes conversations and what else has prompts and answers."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        handler = HANDLERS[plan.handler]
        self._chat = make_chat(plan) if handler.needs_chat else None
        self._handler = make_handler(plan, self._encoder, self._chat)
        self._tracks = 1 + max(output.track for output in handler.outputs)
        eos_id = self._chat.eos_id if self._chat else plan.facts.eos_id
        self._stop_ids = self._chat.stop_ids if self._chat else ()
        if eos_id is not None:
            self._stop_ids = (*self._stop_ids, eos_id)
        self._assembler = Assembler(self._encoder, eos_id if plan.append_eod else None)

    def __call__(self, block: Block) -> Encoded:
        """Encode one block."""
        encoded = Encoded(0, BlockCounts())
        rendered, lines = [], []
        for line, record in self._records(block, encoded):
            try:
                rendered.append(self._handler.render(record))
                lines.append(line)
            except UnusableRecord as error:
                encoded.counts.drop(str(error), line)
            except MalformedRecord as error:
                if self._refuse(encoded, line, str(error)):
                    break
        self._check(_texts(rendered[len(rendered) // 2 :]))
        batch = self._assembler.encode([track for tracks in rendered for track in tracks])
        self._fit(batch, lines, encoded)
        return encoded

    def _fit(self, batch: Batch, lines: list[int], encoded: Encoded) -> None:
        """Cut or drop what is too long or holds nothing to learn."""
        counts, limit, cuts = encoded.counts, self._plan.limit, self._plan.too_long == "cut"
        sizes = self._by_record(batch.sizes).max(axis=1)
        counts.measure(*max(zip(sizes.tolist(), lines), default=(0, 0)))
        is_long = sizes > (limit or sys.maxsize)
        if self._plan.too_long == "error" and is_long.any():
            place = int(is_long.argmax())
            encoded.stopped = (
                lines[place],
                f"has {sizes[place]} tokens, more than --seq-length {limit}: raise --seq-length, "
                "or choose --too-long drop or cut",
            )
            return
        if cuts and is_long.any():
            tracks = zip(batch, np.repeat(is_long, self._tracks))
            cut = [shorten(track, limit or 0) if is_cut else track for track, is_cut in tracks]
            batch = Batch.of(cut, batch.dtype)
        learnt, last = map(self._by_record, batch.whole.count_learnt())
        reasons = {
            too_long_reason(limit): is_long & (not cuts),
            "nothing to learn": (learnt.min(axis=1) == 0) & self._handler.learns,
            "no tokens": self._by_record(batch.sizes).min(axis=1) == 0,
        }
        dropped = np.select([*reasons.values()], range(1, 1 + len(reasons)))
        for place in np.flatnonzero(dropped):
            counts.drop([*reasons][dropped[place] - 1], lines[place])
        kept = dropped == 0
        ended = np.all(np.isin(last, self._stop_ids), axis=1)
        counts.truncated += [lines[place] for place in np.flatnonzero(kept & is_long)]
        counts.written = int(kept.sum())
        counts.learnt += int(learnt[kept].sum())
        counts.ended += int(ended[kept].sum())
        for track in range(self._tracks):
            is_track = np.arange(len(batch)) % self._tracks == track
            encoded.tracks.append(batch.join(np.repeat(kept, self._tracks) & is_track))
            counts.tokens += len(encoded.tracks[-1].ids)

    def _by_record(self, values: Array) -> Array:
        """Arrange what there is of each sequence: a row a record."""
        return values.reshape(-1, self._tracks)


def _texts(rendered: list[list[list[Piece]]]) -> Iterator[str]:
    for tracks in rendered:
        for piece in tracks[0]:
            yield from (part for part in piece.parts if isinstance(part, str))


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
    exit_with_parent()
    _worker = get_worker()
    gc.freeze()  # what is there now stays: looking through it again and again costs a tenth


def _work(block: Block) -> Encoded:
    assert _worker is not None
    return _worker(block)
