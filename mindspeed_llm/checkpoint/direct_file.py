"""A file written past the page cache: durable several times sooner than written and flushed."""

import errno
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType

from mindspeed.checkpoint.digests import SLICE, FileRecord, Hasher

BLOCK = 8 << 20
"""Bytes written at a time, a multiple of what disks and pages are made of."""
SECTOR = 4096
DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """A new file that is on the disk when it is closed, written from its first byte to its last.

    Where the file system has no direct writing, it is written as any other file.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            self._descriptor = os.open(path, flags | DIRECT, 0o666)
        except OSError as error:
            if not DIRECT or error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # made before it was refused
            self._descriptor = os.open(path, flags, 0o666)
        self._memory = mmap.mmap(-1, BLOCK)  # begins with a page, as direct writing wants it
        self._start = 0  # where in the file the memory belongs
        self._used = 0
        self._hasher = Hasher()

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes; each slice is hashed while the cache has it."""
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
        """Return where the next bytes go."""
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
        """Write the beginning of the memory."""
        view, done = memoryview(self._memory), 0
        while done < size:
            try:
                done += os.pwrite(self._descriptor, view[done:size], self._start + done)
            except OSError as error:
                # Some file systems take the flag and then refuse the write.
                if error.errno != errno.EINVAL or not self._leave_direct():
                    raise

    def _leave_direct(self) -> bool:
        """Go on as any other file; return whether it was not one before."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~DIRECT)
        return bool(flags & DIRECT)
