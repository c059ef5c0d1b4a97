"""Preprocess data files to token files: encode, pack, publish, and account for every record."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np

from mindspeed.config import ConfigError
from mindspeed_llm.data.finalize import Workspace, finalize
from mindspeed_llm.data.handlers import HANDLERS, PRETRAIN
from mindspeed_llm.data.indexed import TokenWriter, smallest_dtype
from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.plan import Plan, make_plan, outputs
from mindspeed_llm.data.readers import Block, Source, blocks
from mindspeed_llm.data.readers.blocks import BLOCK_BYTES
from mindspeed_llm.data.summary import MAX_LOGGED_RECORDS, Summary, record_location
from mindspeed_llm.data.tokenizer import TokenizerFacts
from mindspeed_llm.data.worker import Encoded, encode_blocks

logger = logging.getLogger(__name__)

FORMAT = 5
"""Incremented when the output changes, so that no run resumes one of another version."""
LOG_SECONDS = 10.0
NEUTRAL_OPTIONS = {"workers", "n_subs", "log_interval", "cache_dir", "accelerator", "output_prefix"}
"""Options that do not change the output."""

Report = Callable[[Summary, int], None]


def preprocess(
    options: PreprocessOptions,
    facts: TokenizerFacts | None = None,
    report: Report | None = None,
    *,
    block_bytes: int = BLOCK_BYTES,
    save_seconds: float = 10.0,
) -> Summary:
    """Write the token files that `options` describe and return a summary of the records.

    `facts` saves loading the tokenizer; `report` is called with the summary and the bytes read. A
    killed run loses at most `save_seconds` of work, and the blocks in flight.
    """
    plan, sources = make_plan(options, facts)
    run = _Run(plan, options, sources, report, block_bytes=block_bytes, save_seconds=save_seconds)
    try:
        return run.run()
    except ConfigError:
        run.discard()  # the data must change, and then nothing can be reused
        raise
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        raise ConfigError(
            f"{file}{error.strerror}; progress is kept in {run.folder}: fix this and "
            "run the same command again"
        ) from None
    except KeyboardInterrupt:
        if run.folder.exists():
            logger.warning("interrupted; the same command resumes from %s", run.folder)
        raise
    finally:
        run.close()


class _Run:
    """One run over the data, from the first block or resumed from a killed run."""

    def __init__(
        self,
        plan: Plan,
        options: PreprocessOptions,
        sources: list[Source],
        report: Report | None,
        *,
        block_bytes: int,
        save_seconds: float,
    ) -> None:
        self._plan, self._options, self._sources, self._report = plan, options, sources, report
        self._block_bytes, self._save_seconds = block_bytes, save_seconds
        self._workspace = Workspace(str(options.output_prefix), self._fingerprint())
        self.folder = self._workspace.folder
        state = self._workspace.state
        self._done: int = state.get("blocks", 0)
        self._lines: int = state.get("lines", 0)
        self._bytes: int = state.get("bytes", 0)
        self._path: str = state.get("path", "")
        self._summary = Summary.from_dict(state["summary"]) if state else Summary()
        self._summary.is_chat = options.handler_name != PRETRAIN
        self._writers: dict[str, TokenWriter] = {}
        if state:
            logger.info("resuming a run that stopped after %d records", self._summary.records)

    def run(self) -> Summary:
        """Encode the remaining blocks and finalize."""
        if self._workspace.is_publishing:
            self._workspace.resume_publish()
            return self._summary
        started = time.monotonic() - self._summary.seconds
        self._writers = self._open_writers(self._workspace.state.get("sizes", {}))
        with closing(self._encode()) as blocks_done:
            for _ in blocks_done:
                self._summary.seconds = time.monotonic() - started
                if self._report is not None:
                    self._report(self._summary, self._bytes)
        self._save()
        finalize(self._plan, self._options, self._workspace, self._writers, self._summary)
        self._summary.seconds = time.monotonic() - started
        return self._summary

    def _encode(self) -> Generator[None, None, None]:
        """Write block after block; yield after each."""
        columns = [*self._plan.columns.names.values(), *self._plan.columns.media]
        if handler := HANDLERS.get(self._plan.handler):
            columns = [] if handler.keeps_fields else [*columns, *handler.checked]
        todo = islice(blocks(self._sources, columns, self._block_bytes), self._done, None)
        release = self._workspace.release
        saved = logged = time.monotonic()
        logged_records, interval = 0, self._options.log_interval
        with closing(encode_blocks(self._plan, todo, self._processes(), release)) as results:
            for block, encoded in results:
                self._write_block(block, encoded)
                yield
                now = time.monotonic()
                if now - saved >= self._save_seconds:
                    self._save()
                    saved = now
                new_records = self._summary.records - logged_records
                if self._report is None and now - logged > LOG_SECONDS and new_records >= interval:
                    logged, logged_records = now, self._summary.records
                    logger.info("%d records, %d tokens", logged_records, self._summary.tokens)

    def close(self) -> None:
        """Close the files and release the work folder."""
        for writer in self._writers.values():
            writer.close()
        self._workspace.release()

    def discard(self) -> None:
        """Remove the work folder."""
        self._workspace.discard()

    def _processes(self) -> int:
        """Return the number of processes: at most one a core and one a block."""
        asked = max(self._options.workers, self._options.n_subs)
        cores = len(os.sched_getaffinity(0))
        if asked > cores:
            logger.info("%d workers requested; using %d, one per core", asked, cores)
        size = sum(source.size for source in self._sources)
        return min(asked, cores, max(1, size // self._block_bytes))

    def _open_writers(self, sizes: dict[str, int]) -> dict[str, TokenWriter]:
        is_text = self._plan.handler == PRETRAIN
        dtype = smallest_dtype(self._plan.facts.size) if is_text else np.dtype("<i4")
        keys = [output.key for output in outputs(self._plan)]
        writers = {key: TokenWriter(self._workspace.folder, key, dtype) for key in keys}
        for writer in writers.values():
            writer.truncate(sizes)
        return writers

    def _write_block(self, block: Block, encoded: Encoded) -> None:
        """Write one block and count its records."""
        path = block.source.path
        if path != self._path:
            self._path, self._lines = path, 0
        if encoded.stopped is not None:
            line, reason = encoded.stopped
            raise ConfigError(f"{record_location(path, self._lines + line)}: {reason}")
        for key, track, content in outputs(self._plan):
            found = encoded.tracks[track]
            self._writers[key].append(found.column(content), found.lengths, found.document_ends)
        before = self._num_malformed()
        malformed = self._summary.add(encoded.counts, path, self._lines)
        for text in malformed[: max(0, MAX_LOGGED_RECORDS - before)]:
            logger.warning("skipped: %s", text)
        self._lines += encoded.lines
        self._bytes += block.end - block.start
        self._done += 1

    def _num_malformed(self) -> int:
        tally = self._summary.skipped.get("malformed")
        return tally.count if tally else 0

    def _save(self) -> None:
        sizes = {name: n for w in self._writers.values() for name, n in w.sizes().items()}
        self._workspace.save(
            {
                "blocks": self._done,
                "lines": self._lines,
                "bytes": self._bytes,
                "path": self._path,
                "sizes": sizes,
                "summary": self._summary.as_dict(),
            }
        )

    def _fingerprint(self) -> str:
        """Return a digest of everything that decides the output: only the same run may resume."""
        plan = asdict(self._plan)
        plan["facts"] = self._plan.facts.fingerprint
        plan.pop("accelerate")
        options = self._options.model_dump(exclude=NEUTRAL_OPTIONS)
        sources = [asdict(source) for source in self._sources]
        content: Any = [FORMAT, self._block_bytes, plan, options, sources]
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()
