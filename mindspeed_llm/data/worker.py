"""Workers, which encode blocks of records, and the pool that keeps their results in order."""

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
from mindspeed_llm.data.chat import Segment
from mindspeed_llm.data.conversation import MalformedRecord, UnusableRecord
from mindspeed_llm.data.handlers import HANDLERS, PRETRAIN
from mindspeed_llm.data.handlers.base import SAME_ANSWERS, as_text, check_media
from mindspeed_llm.data.indexed import Array, smallest_dtype
from mindspeed_llm.data.plan import Plan, make_chat, make_encoder, make_handler
from mindspeed_llm.data.readers import Block, Problem, read
from mindspeed_llm.data.samples import (
    Batch,
    SampleEncoder,
    Sequences,
    Track,
    truncate,
    truncate_pair,
)
from mindspeed_llm.data.summary import BlockCounts, too_long_reason

CHECKED_CHARS_FIRST, CHECKED_CHARS_LATER = 50_000, 250
"""Characters of the first and of later blocks on which the accelerator is compared."""
BLOCKS_PER_PROCESS = 2
"""Blocks in flight per process: one being encoded and one queued."""
NO_TAG: Array = np.zeros(0, np.int32)
TOKENIZER_THREADS = "TOKENIZERS_PARALLELISM"


@dataclass
class Encoded:
    """An encoded block: tokens by the `track` of the output files, and counts of its records."""

    lines: int
    counts: BlockCounts
    tracks: list[Sequences] = field(default_factory=list)
    stopped: tuple[int, str] | None = None
    """The line of the record that stops the run, with the reason and what to do."""


def make_worker(plan: Plan) -> Worker:
    """Build the worker of a plan."""
    return DocumentWorker(plan) if plan.handler == PRETRAIN else SampleWorker(plan)


class Worker(ABC):
    """Base of both kinds of workers: reads records and handles malformed ones."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._encoder = make_encoder(plan)
        self._chars_to_check = CHECKED_CHARS_FIRST

    @abstractmethod
    def __call__(self, block: Block) -> Encoded:
        """Encode one block."""

    def _records(self, block: Block, encoded: Encoded) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the records of a block; malformed lines are counted or stop the block."""
        rows, encoded.lines = read(block)
        for line, record in rows:
            encoded.counts.records += 1
            problem = self._problem(record)
            if problem is None:
                yield line, record  # type: ignore[misc]
            elif self._reject(encoded, line, problem):
                return

    def _problem(self, record: dict[str, Any] | Problem) -> str | None:
        if isinstance(record, Problem):
            return record.reason
        try:
            check_media(record, self._plan.columns.media)
        except MalformedRecord as error:
            return str(error)
        return None

    def _reject(self, encoded: Encoded, line: int, reason: str) -> bool:
        """Count a malformed record, or stop at it and return True."""
        if self._plan.skip_malformed:
            encoded.counts.malformed.append((line, reason))
            return False
        advice = "correct it, or leave such records out with --on-bad-line skip"
        encoded.stopped = (line, f"{reason}; {advice}")
        return True

    def _check(self, texts: Iterable[str]) -> None:
        """Verify the accelerator on some of this block: more of the first, a little of others."""
        remaining, samples = self._chars_to_check, []
        for text in texts:
            samples.append(text[:remaining])
            remaining -= len(samples[-1])
            if remaining <= 0:
                break
        if samples:
            self._encoder.check(samples)
            self._chars_to_check = CHECKED_CHARS_LATER


class DocumentWorker(Worker):
    """Encodes plain documents, one output file per column."""

    def __call__(self, block: Block) -> Encoded:
        """Encode one block."""
        encoded = Encoded(0, BlockCounts())
        texts: dict[str, list[str]] = {key: [] for key in self._plan.keys}
        lines: list[int] = []
        for line, record in self._records(block, encoded):
            try:
                found = [self._document(record, key) for key in self._plan.keys]
            except MalformedRecord as error:
                if self._reject(encoded, line, str(error)):
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
        """Encode documents as Megatron stores them: an empty one has an end but no sequence."""
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
            index = int(lengths.argmax())
            counts.measure(int(lengths[index]), lines[index])
        counts.tokens += len(tokens)
        counts.trained += len(tokens)
        return Sequences(tokens, lengths[full], np.cumsum(full))


class SampleWorker(Worker):
    """Encodes conversations and other records with prompts and completions."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        handler = HANDLERS[plan.handler]
        self._chat = make_chat(plan) if handler.needs_chat else None
        self._handler = make_handler(plan, self._encoder, self._chat)
        tracks = {output.track for output in handler.outputs}
        self._tracks = len(tracks) - handler.is_tagged
        eos_id = self._chat.eos_id if self._chat else plan.facts.eos_id
        self._stop_ids = self._chat.stop_ids if self._chat else ()
        if eos_id is not None:
            self._stop_ids = (*self._stop_ids, eos_id)
        self._sample_encoder = SampleEncoder(self._encoder, eos_id if plan.append_eod else None)

    def __call__(self, block: Block) -> Encoded:
        """Encode one block."""
        encoded = Encoded(0, BlockCounts())
        rendered, lines, tags = [], [], list[Array]()
        for line, record in self._records(block, encoded):
            try:
                tag = self._handler.tag(record) if self._handler.is_tagged else ()
                rendered.append(self._handler.render(record))
                lines.append(line)
                tags.append(np.array(list(tag), np.int32))
            except UnusableRecord as error:
                encoded.counts.drop(str(error), line)
            except MalformedRecord as error:
                if self._reject(encoded, line, str(error)):
                    break
        self._check(_texts(rendered[len(rendered) // 2 :]))
        batch = self._sample_encoder.encode([track for tracks in rendered for track in tracks])
        kept = self._fit_length(batch, lines, encoded)
        if self._handler.is_tagged and encoded.tracks:
            chosen = [tags[index] for index in np.flatnonzero(kept)]
            lengths = np.fromiter(map(len, chosen), np.int64, len(chosen))
            encoded.tracks.append(Sequences(np.concatenate([*chosen, NO_TAG]), lengths))
        return encoded

    def _fit_length(self, batch: Batch, lines: list[int], encoded: Encoded) -> Array:
        """Truncate or drop samples that are too long, and drop those with nothing to train on.

        Returns which records are kept.
        """
        counts, limit, cuts = encoded.counts, self._plan.limit, self._plan.too_long == "cut"
        sizes = self._by_record(batch.sizes).max(axis=1)
        counts.measure(*max(zip(sizes.tolist(), lines), default=(0, 0)))
        is_long = sizes > (limit or sys.maxsize)
        if self._plan.too_long == "error" and is_long.any():
            index = int(is_long.argmax())
            encoded.stopped = (
                lines[index],
                f"has {sizes[index]} tokens, more than --seq-length {limit}: raise --seq-length, "
                "or choose --too-long drop or cut",
            )
            return ~is_long
        if cuts and is_long.any():
            batch = self._truncate(batch, is_long)
        trained, last = map(self._by_record, batch.whole.count_trained())
        reasons = {
            too_long_reason(limit): is_long & (not cuts),
            "nothing to train on": (trained.min(axis=1) == 0) & self._handler.has_completion,
            SAME_ANSWERS: self._are_same(batch, is_long & cuts),
            "no tokens": self._by_record(batch.sizes).min(axis=1) == 0,
        }
        dropped = np.select([*reasons.values()], range(1, 1 + len(reasons)))
        for index in np.flatnonzero(dropped):
            counts.drop([*reasons][dropped[index] - 1], lines[index])
        kept = dropped == 0
        ended = np.all(np.isin(last, self._stop_ids), axis=1)
        counts.truncated += [lines[index] for index in np.flatnonzero(kept & is_long)]
        counts.written = int(kept.sum())
        counts.trained += int(trained[kept].sum())
        counts.ended += int(ended[kept].sum())
        for track in range(self._tracks):
            is_track = np.arange(len(batch)) % self._tracks == track
            encoded.tracks.append(batch.concatenate(np.repeat(kept, self._tracks) & is_track))
            counts.tokens += len(encoded.tracks[-1].ids)
        return kept

    def _truncate(self, batch: Batch, is_long: Array) -> Batch:
        """Truncate the records that are too long."""
        limit, tracks = self._plan.limit or 0, iter(batch)
        cut: list[Track] = []
        for is_cut in is_long:
            record = list(islice(tracks, self._tracks))
            if is_cut and self._tracks > 1:
                record = truncate_pair(record, limit)
            elif is_cut:
                record = [truncate(track, limit) for track in record]
            cut += record
        return Batch.of(cut, batch.dtype)

    def _are_same(self, batch: Batch, is_cut: Array) -> Array:
        """Return which pairs have the same answers now that they are cut."""
        is_same = np.zeros(len(is_cut), bool)
        if self._tracks > 1:
            ids, bounds = batch.whole.ids, np.cumsum([0, *batch.sizes])
            for index in np.flatnonzero(is_cut):
                start, middle, end = bounds[2 * index : 2 * index + 3]
                is_same[index] = np.array_equal(ids[start:middle], ids[middle:end])
        return is_same

    def _by_record(self, values: Array) -> Array:
        """Reshape values of sequences: one row per record."""
        return values.reshape(-1, self._tracks)


def _texts(rendered: list[list[list[Segment]]]) -> Iterator[str]:
    for tracks in rendered:
        for segment in tracks[0]:
            yield from (part for part in segment.parts if isinstance(part, str))


Result = tuple[Block, Encoded]
_worker: Worker | None = None
"""The worker of this process, if it belongs to the pool."""


def encode_blocks(
    plan: Plan, blocks: Iterable[Block], processes: int, release: Callable[[], None]
) -> Generator[Result, None, None]:
    """Yield the blocks in order, each with its tokens; with one process it is this one.

    A worker that is forked from this process calls `release`: it drops what only one may hold.
    """
    if processes == 1:
        worker = make_worker(plan)
        yield from ((block, worker(block)) for block in blocks)
        return
    with _single_threaded_tokenizers():
        pool = _make_pool(plan, processes, release)
        try:
            yield from _ordered_results(pool, blocks, processes * BLOCKS_PER_PROCESS)
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process died (out of memory?): use fewer --workers"
            ) from None
        except BaseException:  # interrupted: the blocks in flight are not needed
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _make_pool(plan: Plan, processes: int, release: Callable[[], None]) -> ProcessPoolExecutor:
    if _can_fork():
        worker = make_worker(plan)  # loaded and checked once, inherited by all
        copies = multiprocessing.get_context("fork")
        return ProcessPoolExecutor(processes, copies, _init_worker, (lambda: worker, release))
    fresh = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, fresh, _init_worker, (partial(make_worker, plan), None))


def _can_fork() -> bool:
    """Return whether this process can be forked: no other thread may hold a lock.

    torch has threads that Python does not know of.
    """
    one_thread = threading.active_count() == 1 and "torch" not in sys.modules
    return one_thread and sys.platform == "linux"


@contextmanager
def _single_threaded_tokenizers() -> Iterator[None]:
    """Keep tokenizers in the calling thread: the processes are the parallelism."""
    before = os.environ.get(TOKENIZER_THREADS)
    os.environ[TOKENIZER_THREADS] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[TOKENIZER_THREADS]
        else:
            os.environ[TOKENIZER_THREADS] = before


def _ordered_results(
    pool: ProcessPoolExecutor, blocks: Iterable[Block], ahead: int
) -> Iterator[Result]:
    pending: deque[tuple[Block, Future[Encoded]]] = deque()
    for block in blocks:
        with _defer_sigint():
            pending.append((block, pool.submit(_encode_block, block)))
        if len(pending) >= ahead:
            yield _next_result(pending)
    while pending:
        yield _next_result(pending)


@contextmanager
def _defer_sigint() -> Iterator[None]:
    """Block SIGINT in the processes that start here, until they ignore it themselves."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _next_result(pending: deque[tuple[Block, Future[Encoded]]]) -> Result:
    block, future = pending.popleft()
    return block, future.result()


def _init_worker(get_worker: Callable[[], Worker], release: Callable[[], None] | None) -> None:
    """Make this process a worker that exits when its parent does, however that exits."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if release is not None:
        release()
    exit_with_parent()
    _worker = get_worker()
    gc.freeze()  # what is loaded now stays: scanning it in every collection costs a tenth


def _encode_block(block: Block) -> Encoded:
    assert _worker is not None
    return _worker(block)
