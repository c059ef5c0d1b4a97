"""Explain why a file could not be written: torch often hides the error of the disk."""

import errno
import os
import re
import resource
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
"""Where background writers share semaphores and tensors."""
PROBE_BYTES = 2**20
"""Writers continue until a disk is full, so a probe of this size fails afterwards."""
FULL = (errno.ENOSPC, errno.EDQUOT)
_TORCH_WRITE_ERROR = re.compile(
    r"inline_container|PytorchStreamWriter|unexpected pos|results_queue should not be empty"
)
_FULL_MESSAGE = re.compile("No space left|File too large|quota exceeded", re.IGNORECASE)


def is_write_error(error: BaseException) -> bool:
    """Return whether an error is what torch raises when it cannot write a file."""
    return _TORCH_WRITE_ERROR.search(str(error)) is not None


def explain(message: str, folder: Path, last: Path | None = None) -> str:
    """Return what is full, if anything is; otherwise the message of the error unchanged.

    `last` is the previous checkpoint, whose size shows how much space one needs.
    """
    if not _TORCH_WRITE_ERROR.search(message) and not _FULL_MESSAGE.search(message):
        return message
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    is_limited = limit != resource.RLIM_INFINITY and "No space left" not in message
    if is_limited and _largest(folder) >= limit:
        return f"{os.strerror(errno.EFBIG)}: the limit of a file is {limit} bytes (ulimit -f)"
    for path in (folder, SHARED_MEMORY):
        try:
            _probe(path)
        except OSError as error:
            if error.errno in FULL:
                usage = shutil.disk_usage(path)
                free = f"{usage.free} of {usage.total} bytes are free"
                needed = f"; the last checkpoint has {_size(last)} bytes" if last else ""
                return f"{error.strerror}: {free} on the disk at {_mount_point(path)}{needed}"
    return message


def _largest(folder: Path) -> int:
    return max((path.stat().st_size for path in folder.rglob("*") if path.is_file()), default=0)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _probe(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())


def _mount_point(path: Path) -> Path:
    path = path.resolve()
    return next(parent for parent in (path, *path.parents) if os.path.ismount(parent))
