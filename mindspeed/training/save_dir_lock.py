"""Keeps other runs out of the directory that a run saves in."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mindspeed.config import ConfigError

TRIES, PAUSE = 20, 0.5


class SaveDirLock:
    """An exclusive lock on a directory, held until this process ends, in whatever way."""

    def __init__(self, folder: str) -> None:
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._file = (path / ".lock").open("a")
        except OSError as error:
            raise ConfigError(f"--save {folder}: cannot be written ({error.strerror})") from None
        for _ in range(TRIES):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Writers that outlive a killed run must not keep the next one waiting.
                os.register_at_fork(after_in_child=self._file.close)
                return
            except BlockingIOError:
                time.sleep(PAUSE)  # a run that was just killed may need a moment to end
        self._file.close()
        raise ConfigError(f"--save {folder}: process {_holder(path)} is saving there now")

    def release(self) -> None:
        """Let another run have the directory."""
        self._file.close()


@contextmanager
def release_on_error(lock: SaveDirLock | None) -> Iterator[None]:
    """Release the lock if setting up a run fails: a Python program may try again."""
    try:
        yield
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def _holder(folder: Path) -> str:
    """Return the id of the process that holds the lock, as the kernel lists it."""
    inode = os.stat(folder / ".lock").st_ino
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return "of another run"
    owners = [line.split()[4] for line in lines if f":{inode} " in line]
    return owners[0] if owners else "of another run"
