"""A file written past the page cache: durable several times sooner than written and flushed."""

import errno
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType

BLOCK = 8 << 20
"""Bytes written at a time, a multiple of what disks and pages are made of."""
SECTOR = 4096
DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """A new file that is on the disk when it is closed; going back to correct a few bytes is fine.

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
        self._position = 0
        self._corrections: list[tuple[int, bytes]] = []

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes; before the last block they are kept until the end."""
        view = memoryview(data)
        if self._position < self._start:
            self._corrections.append((self._position, bytes(view)))
            self._position += len(view)
            return len(view)
        done = 0
        while done < len(view):
            place = self._position - self._start
            count = min(BLOCK - place, len(view) - done)
            self._memory[place : place + count] = view[done : done + count]
            done += count
            self._position += count
            self._used = max(self._used, place + count)
            if self._used == BLOCK:
                self._write_out(BLOCK)
                self._start, self._used = self._start + BLOCK, 0
        return done

    def tell(self) -> int:
        """Return where the next bytes go."""
        return self._position

    def seek(self, position: int) -> int:
        """Go back to bytes that were written, or forth again to the end."""
        self._position = position
        return position

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
        self._leave_direct()
        for position, data in self._corrections:
            os.pwrite(self._descriptor, data, position)
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
