"""Take in what ranks write: pass it on, and keep the last of it for an error message."""

import os
import re
import selectors
from typing import BinaryIO

_KEPT_BYTES = 65536
_CHUNK = 65536
_LAST_LINES = 40
# torch marks the lines of an uncaught traceback like this; we name the rank ourselves.
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_CHAINED = re.compile("During handling of the above exception|The above exception was the direct")
# Enough to empty a full pipe (1 MiB at most), and a bound for a rank that never stops writing.
_ROUNDS = 16


class Tail:
    """The last part of a rank's output."""

    def __init__(self) -> None:
        self._kept = b""

    def add(self, data: bytes) -> None:
        """Remember data, forgetting the oldest."""
        self._kept = (self._kept + data)[-_KEPT_BYTES:]

    def text(self) -> str:
        """Return what is kept."""
        return self._kept.decode(errors="replace")


def error_tail(text: str) -> str:
    """Cut output down to what explains its end: its tracebacks, or else its last lines."""
    lines = _TORCH_PREFIX.sub("", text).rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
    # The last traceback, and those before it that led to it.
    while len(starts) > 1 and any(map(_CHAINED.match, lines[starts[-2] : starts[-1]])):
        starts.pop()
    first = starts[-1] if starts else max(0, len(lines) - _LAST_LINES)
    return "\n".join(lines[first:])


def stacks(text: str) -> str:
    """Cut what Python writes on SIGABRT down to the stacks of its threads."""
    dump = text[text.rfind("Fatal Python error: Aborted") :]
    kept = dump.partition("\n")[2].partition("\nExtension modules:")[0]
    return kept.strip() or "no Python stack was written"


class Relay:
    """Reads the pipes of all ranks and hands each piece to a tail and, where wanted, to a sink."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.muted = False

    def add(self, pipe: BinaryIO, tail: Tail, sink: BinaryIO | None, prefix: str = "") -> None:
        """Follow a pipe until its end; with a prefix, only whole lines are passed on."""
        os.set_blocking(pipe.fileno(), False)
        self._selector.register(
            pipe, selectors.EVENT_READ, _Stream(pipe, tail, sink, prefix.encode())
        )

    def pump(self, seconds: float) -> None:
        """Wait up to seconds for output and take in all that has arrived."""
        for _ in range(_ROUNDS):
            ready = self._selector.select(seconds)
            for key, _ in ready:
                if not key.data.take(self.muted):
                    self._selector.unregister(key.fileobj)
                    key.data.pipe.close()
            if not ready:
                return
            seconds = 0.0

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *error: object) -> None:
        for key in list(self._selector.get_map().values()):
            key.data.pipe.close()
        self._selector.close()


class _Stream:
    def __init__(self, pipe: BinaryIO, tail: Tail, sink: BinaryIO | None, prefix: bytes) -> None:
        self.pipe = pipe
        self._tail = tail
        self._sink = sink
        self._prefix = prefix
        self._line = b""

    def take(self, muted: bool) -> bool:
        data = os.read(self.pipe.fileno(), _CHUNK)
        self._tail.add(data)
        if self._sink is not None and not muted:
            self._sink.write(self._prefixed(data) if self._prefix else data)
            self._sink.flush()
        return bool(data)

    def _prefixed(self, data: bytes) -> bytes:
        *lines, self._line = (self._line + data).split(b"\n")
        if not data and self._line:  # the end of the pipe: an unfinished line is passed on as it is
            lines, self._line = [self._line], b""
        return b"".join(self._prefix + line + b"\n" for line in lines)
