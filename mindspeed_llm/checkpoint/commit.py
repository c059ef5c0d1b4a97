"""Directories that appear under their name only when they are complete."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from mindspeed.config import ConfigError

ASIDE, OLD = ".incomplete-", ".replaced-"
CHECKPOINT = re.compile(r"iter_\d+|release")
"""Names of directories that hold one checkpoint and nothing else."""
CONFIGS = ("config.json", "adapter_config.json")
"""One of them is in every directory that holds an HF model, or adapters, and nothing else."""


@contextlib.contextmanager
def written_aside(final: Path, overwrite: bool = False) -> Iterator[Path]:
    """Give a directory to write in; put it in place at the end, or remove it on an error."""
    if final.is_dir() and not any(final.iterdir()):
        overwrite = True
    _check_free(final, overwrite)
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
        _check_free(final, overwrite)  # another process may have been faster
        _replace(aside, final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):
                final.parent.rmdir()
        raise


def _check_free(final: Path, overwrite: bool) -> None:
    """Raise if something stands in the place that was not to be replaced, or is no model."""
    if not final.exists():
        return
    if final.is_file():
        raise ConfigError(f"{final}: is a file: give a directory")
    if not overwrite:
        raise ConfigError(f"{final}: exists already: choose another place or give --overwrite")
    if CHECKPOINT.fullmatch(final.name):
        return
    entries = sorted(final.iterdir())
    others = [path.name for path in entries if path.is_dir()]
    if entries and not any((final / name).is_file() for name in CONFIGS):
        others += [path.name for path in entries if path.name not in others]
    if others:
        raise ConfigError(
            f"{final}: --overwrite replaces a model, and this holds other things, such as "
            f"{others[0]}: choose another place"
        )


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
