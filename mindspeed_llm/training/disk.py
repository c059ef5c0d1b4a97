"""Why files of a checkpoint could not be written: torch often hides the error of the disk."""

import errno
import os
import re
import resource
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
"""Where processes that write in the background share semaphores and tensors."""
PROBE = 2**20
"""Bytes; writers go on until a disk is full, so that there is no space for them afterwards."""
_HIDDEN = re.compile(
    r"inline_container|PytorchStreamWriter|unexpected pos|results_queue should not be empty"
)
FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_WORDS = re.compile("No space left|File too large|quota exceeded", re.IGNORECASE)


def is_hidden(error: BaseException) -> bool:
    """Return whether an error is what torch raises when it cannot write a file."""
    return _HIDDEN.search(str(error)) is not None


def explain(text: str, folder: Path, last: Path | None = None) -> str:
    """Say what is full, if it is that: `text` is what the error says of itself.

    `last` is the checkpoint before, which tells how much space one needs.
    """
    if not _HIDDEN.search(text) and not _FULL_WORDS.search(text):
        return text
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    is_limited = limit != resource.RLIM_INFINITY and "No space left" not in text
    if is_limited and _largest(folder) >= limit:
        return f"{os.strerror(errno.EFBIG)}: the limit of a file is {limit} bytes (ulimit -f)"
    for place in (folder, SHARED_MEMORY):
        try:
            _probe(place)
        except OSError as error:
            if error.errno in FULL:
                usage = shutil.disk_usage(place)
                free = f"{usage.free} of {usage.total} bytes are free"
                needed = f"; the last checkpoint has {_size(last)} bytes" if last else ""
                return f"{error.strerror}: {free} on the disk at {_mount_point(place)}{needed}"
    return text


def _largest(folder: Path) -> int:
    return max((path.stat().st_size for path in folder.rglob("*") if path.is_file()), default=0)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _probe(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(PROBE))
        file.flush()
        os.fsync(file.fileno())


def _mount_point(path: Path) -> Path:
    path = path.resolve()
    return next(place for place in (path, *path.parents) if os.path.ismount(place))
