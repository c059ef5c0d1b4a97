"""Verify the entries of .distcp files as they are loaded, so that nothing is read twice."""

import io
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from mindspeed.checkpoint.digests import FileRecord, Piece, difference, pieces_of, verify
from mindspeed.config import ConfigError

SUFFIX = ".distcp"
"""Of files that hold entries; all others are small."""
LARGE = 1 << 20
"""Bytes of a read that is hashed while it goes on: the numbers of a tensor."""
STEP = 2 << 20
"""Bytes that are read while those before them are hashed."""


class EntryVerifier:
    """Compares what one rank loads with its digests, one entry after the other."""

    def __init__(self, folder: Path, files: Mapping[str, FileRecord]) -> None:
        self._folder, self._files = folder, files
        shards = {name: record for name, record in files.items() if name.endswith(SUFFIX)}
        self._pieces = {(p.path, p.offset): p for p in pieces_of(folder, shards, {})}
        self._verified: set[Piece] = set()
        self._file: BinaryIO | None = None
        self._entry: _Entry | None = None
        self._thread = ThreadPoolExecutor(1)

    def open(self, name: str, offset: int, length: int) -> "_Entry | None":
        """Return the entry to load next, or None if it has been verified; end the one before."""
        self._end_entry()
        path = self._folder / name
        piece = self._pieces.get((path, offset))
        if piece is None or piece.length != length:  # digests of a writer that knew no entries
            record = {name: self._files[name]} if name in self._files else {}
            for each in pieces_of(self._folder, record, {name: [(offset, length)]}):
                self._compare(each, each.found)
            return None
        if piece in self._verified:  # tensors of other layouts are in several parts of an entry
            return None
        if self._file is None or self._file.name != str(path):
            self._close()
            self._file = path.open("rb", buffering=0)
        self._entry = _Entry(self._file, piece, self._thread)
        return self._entry

    def finish(self) -> None:
        """Verify the last entry, whether it could be loaded or not."""
        try:
            self._end_entry()
        finally:
            self._close()

    def _end_entry(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._compare(entry.piece, entry.found)

    def _compare(self, piece: Piece, find: Callable[[], str]) -> None:
        if piece not in self._verified:
            if (found := find()) != piece.digest:
                raise ConfigError(difference(piece, found, self._folder, self._files))
            self._verified.add(piece)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _Entry(io.RawIOBase):
    """A part of a file, read like a file of its own; torch reads the numbers of a tensor at once.

    Their digest is made of the bytes that torch gets. The few before and behind them, which it
    reads in another order, are read once more.
    """

    def __init__(self, file: BinaryIO, piece: Piece, thread: ThreadPoolExecutor) -> None:
        super().__init__()
        self.piece = piece
        self._file, self._thread = file, thread
        self._hash, self._hashed = xxhash.xxh3_128(), 0
        self._position = 0

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that it can be read anywhere."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.piece.length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes."""
        view = memoryview(buffer)[: max(0, self.piece.length - self._position)]
        if len(view) < LARGE or self._position < self._hashed:
            return self._read(view)
        self._hash_until(self._position)
        start, last = self._position, None
        try:
            while len(view) and (count := self._read(view[:STEP])):
                last = self._thread.submit(self._hash.update, view[:count])
                view = view[count:]
        finally:
            if last is not None:
                last.result()  # the buffer is torch's: it may be gone after this
        self._hashed = self._position
        return self._position - start

    def found(self) -> str:
        """Return the digest of all of it."""
        self._hash_until(self.piece.length)
        return self._hash.hexdigest()

    def _read(self, view: memoryview) -> int:
        count = os.preadv(self._file.fileno(), [view], self.piece.offset + self._position)
        self._position += count
        return count

    def _hash_until(self, stop: int) -> None:
        while self._hashed < stop:
            start, wanted = self.piece.offset + self._hashed, min(LARGE, stop - self._hashed)
            if not (data := os.pread(self._file.fileno(), wanted, start)):
                break
            self._hash.update(data)
            self._hashed += len(data)


def verify_but_entries(folder: Path, *, enabled: bool) -> EntryVerifier | None:
    """Verify the files without entries, all ranks together; entries follow as they are loaded."""
    files = verify(folder, enabled=enabled, but=SUFFIX, is_shared=True)
    return None if files is None else EntryVerifier(folder, files)
