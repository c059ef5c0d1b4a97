"""Directories that appear under their name only when they are complete."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mindspeed.config import ConfigError

ASIDE, OLD = ".incomplete-", ".replaced-"


@contextlib.contextmanager
def written_aside(final: Path, overwrite: bool = False) -> Iterator[Path]:
    """Give a directory to write in; put it in place at the end, or remove it on an error."""
    if final.is_dir() and not any(final.iterdir()):
        overwrite = True
    if final.exists() and not overwrite:
        raise ConfigError(f"{final}: exists already: choose another place or give --overwrite")
    try:
        is_new = not final.parent.exists()
        final.parent.mkdir(parents=True, exist_ok=True)
        _clear_remains(final)
        aside = final.parent / f".{final.name}{ASIDE}{os.getpid()}"
        aside.mkdir()
    except OSError as error:
        raise ConfigError(f"{final}: cannot be written ({error.strerror})") from None
    try:
        yield aside
        flush_tree(aside)
        _replace(aside, final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):
                final.parent.rmdir()
        raise


def write_file(path: Path, text: str) -> None:
    """Write a small file that is complete whenever it can be seen."""
    aside = path.with_name(f".{path.name}{ASIDE}{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    _flush(path.parent)


def flush_tree(folder: Path) -> None:
    """Put the names (and small files) of a directory and of those below it on the disk."""
    for parent, _, files in os.walk(folder):
        for name in files:
            _flush(Path(parent) / name)
        _flush(Path(parent))


def _replace(aside: Path, final: Path) -> None:
    """Rename; what was there before can be found again until the new one is there."""
    old = final.parent / f".{final.name}{OLD}{os.getpid()}"
    if final.exists():
        os.rename(final, old)
    os.rename(aside, final)
    _flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _clear_remains(final: Path) -> None:
    """Put back or remove what killed processes left behind."""
    for path in final.parent.glob(f".{final.name}{OLD}*"):
        if not final.exists() and not _is_running(path):
            os.rename(path, final)
    for path in final.parent.glob(f".{final.name}.*-*"):
        if path.name.startswith((f".{final.name}{ASIDE}", f".{final.name}{OLD}")):
            if not _is_running(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_running(path: Path) -> bool:
    """Return whether the process that made a directory still runs."""
    try:
        os.kill(int(path.name.rpartition("-")[2]), 0)
    except PermissionError:
        return True
    except (ValueError, OSError, OverflowError):
        return False
    return True


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
