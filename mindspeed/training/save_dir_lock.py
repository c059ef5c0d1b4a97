"""Keeps other runs out of the directory that a run saves in."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from mindspeed.config import ConfigError

TRIES, PAUSE = 20, 0.5


class SaveDirLock:
    """An exclusive lock on a directory, held until this process ends, in whatever way."""

    def __init__(self, folder: str) -> None:
        path = Path(folder)
        self._path = path / ".lock"
        self._created = [one for one in (self._path, path, *path.parents) if not _exists(one)]
        for _ in range(TRIES):
            self._file = self._open(folder)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                time.sleep(PAUSE)  # a run that was just killed may need a moment to end
                continue
            if _is_same(self._file, self._path):
                # Writers that outlive a killed run must not keep the next one waiting.
                os.register_at_fork(after_in_child=self._file.close)
                return
            self._file.close()  # a run that failed has removed this file since it was opened
        raise ConfigError(f"--save {folder}: process {_holder(path)} is saving there now")

    def _open(self, folder: str) -> TextIO:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return self._path.open("a")
        except OSError as error:
            raise ConfigError(f"--save {folder}: cannot be written ({error.strerror})") from None

    def release(self) -> None:
        """Let another run have the directory."""
        self._file.close()

    def discard(self) -> None:
        """Release, and remove the lock file and the directories that it created, if empty."""
        with suppress(OSError):  # a directory that holds something stays
            for one in self._created:
                one.unlink(missing_ok=True) if one == self._path else one.rmdir()
        self.release()


@contextmanager
def release_on_error(lock: SaveDirLock | None) -> Iterator[None]:
    """Discard the lock if setting up a run fails: nothing is left, and a program may try again."""
    try:
        yield
    except BaseException:
        if lock is not None:
            lock.discard()
        raise


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long: opening the file reports it
        return True


def _is_same(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _holder(folder: Path) -> str:
    """Return the id of the process that holds the lock, as the kernel lists it."""
    inode = os.stat(folder / ".lock").st_ino
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return "of another run"
    owners = [line.split()[4] for line in lines if f":{inode} " in line]
    return owners[0] if owners else "of another run"
