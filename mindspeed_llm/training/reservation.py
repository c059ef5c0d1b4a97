"""Keeps other runs out of the folder that a run saves in."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mindspeed.config import ConfigError

TRIES, PAUSE = 20, 0.5


class Reservation:
    """A folder that is this process's alone until it ends, in whatever way."""

    def __init__(self, folder: str) -> None:
        place = Path(folder)
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._file = (place / ".lock").open("a")
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
        raise ConfigError(f"--save {folder}: process {_holder(place)} is saving there now")

    def release(self) -> None:
        """Let another run have the folder."""
        self._file.close()


@contextmanager
def given_up_on_errors(reservation: Reservation | None) -> Iterator[None]:
    """Release the folder if what comes before training fails: a Python program may try again."""
    try:
        yield
    except BaseException:
        if reservation is not None:
            reservation.release()
        raise


def _holder(folder: Path) -> str:
    """Return the number of the process that holds the lock, as the kernel lists it."""
    number = os.stat(folder / ".lock").st_ino
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return "of another run"
    owners = [line.split()[4] for line in lines if f":{number} " in line]
    return owners[0] if owners else "of another run"
