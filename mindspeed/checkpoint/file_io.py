"""File I/O of checkpoints: memory-mapped reads, ranges read as files, and direct writes."""

import errno
import fcntl
import io
import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mindspeed.checkpoint.digests import SLICE, FileRecord, Hasher
from mindspeed.config import ConfigError

BLOCK = 8 << 20
"""Bytes of one direct write, a multiple of disk sectors and memory pages."""
SECTOR = 4096
DIRECT = getattr(os, "O_DIRECT", 0)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MappedFile:
    """A memory-mapped file; pages are read when touched and can be released at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.size = path.stat().st_size
            if self.size == 0:
                raise ConfigError(f"{path}: is empty")
            # A private copy-on-write mapping: torch wants memory it could write to.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a view of the values at a byte offset, which may be unaligned: see `aligned`."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=start)
        return flat.view(shape)

    def read(self, start: int, stop: int) -> bytes:
        """Return a range of bytes."""
        return self._map[start:stop]

    def read_at(self, buffer: memoryview, offset: int) -> int:
        """Read into a buffer from an offset; return the number of bytes."""
        data = self._map[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def release_pages(self) -> None:
        """Give the pages back; they are read again if touched again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def aligned(values: torch.Tensor) -> torch.Tensor:
    """Return values one can compute with: a copy, if their address is not aligned."""
    if values.data_ptr() % values.itemsize == 0:
        return values
    raw = values.view(_INTEGERS[values.itemsize]).numpy()  # NumPy, unlike torch, minds addresses
    return torch.from_numpy(raw.copy()).view(values.dtype)


class FileRangeReader(io.RawIOBase):
    """A range of bytes of a file, read like a file of its own.

    `read_at(buffer, offset)` fills a buffer from an offset of the underlying file.
    """

    def __init__(self, read_at: Callable[[memoryview, int], int], start: int, length: int) -> None:
        super().__init__()
        self._read_at, self._start, self._length, self._position = read_at, start, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes."""
        return self._advance(self._remaining(buffer))

    def _remaining(self, buffer: Any) -> memoryview:
        """Return the part of a buffer that the rest of the range can fill."""
        return memoryview(buffer)[: max(0, self._length - self._position)]

    def _advance(self, view: memoryview) -> int:
        count = self._read_at(view, self._start + self._position)
        self._position += count
        return count


class DirectFile:
    """A new file written sequentially past the page cache, durable when it is closed.

    That is several times faster than a write and fsync. On file systems without O_DIRECT it is
    written as any other file.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            self._descriptor = os.open(path, flags | DIRECT, 0o666)
        except OSError as error:
            if not DIRECT or error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # created before it was refused
            self._descriptor = os.open(path, flags, 0o666)
        self._memory = mmap.mmap(-1, BLOCK)  # page-aligned, as O_DIRECT requires
        self._start = 0  # file offset of the buffer
        self._used = 0
        self._hasher = Hasher()

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes; each slice is hashed while it is in the cache."""
        view, done = memoryview(data), 0
        while done < len(view):
            count = min(BLOCK - self._used, SLICE, len(view) - done)
            taken = view[done : done + count]
            self._memory[self._used : self._used + count] = taken
            self._hasher.update(taken)
            done += count
            self._used += count
            if self._used == BLOCK:
                self._write_out(BLOCK)
                self._start, self._used = self._start + BLOCK, 0
        return done

    def tell(self) -> int:
        """Return the offset of the next write."""
        return self._start + self._used

    def record(self) -> FileRecord:
        """Return the digests of what has been written."""
        return self._hasher.record()

    def flush(self) -> None:
        """Do nothing: blocks are written when they are full."""

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            os.close(self._descriptor)

    def _finish(self) -> None:
        self._write_out(-(-self._used // SECTOR) * SECTOR)
        os.ftruncate(self._descriptor, self._start + self._used)
        os.fsync(self._descriptor)

    def _write_out(self, size: int) -> None:
        """Write the first `size` bytes of the buffer."""
        view, done = memoryview(self._memory), 0
        while done < size:
            try:
                done += os.pwrite(self._descriptor, view[done:size], self._start + done)
            except OSError as error:
                # Some file systems accept the flag and then refuse the write.
                if error.errno != errno.EINVAL or not self._disable_direct():
                    raise

    def _disable_direct(self) -> bool:
        """Continue with buffered writes; return whether direct writes were enabled before."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~DIRECT)
        return bool(flags & DIRECT)
