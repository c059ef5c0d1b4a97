"""The commit protocol: directories and files appear under their names only when complete."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from mindspeed.config import ConfigError

STAGING, OLD = ".incomplete-", ".replaced-"
CHECKPOINT = re.compile(r"iter_\d+|release")
"""Names of directories that hold one checkpoint and nothing else."""
CONFIGS = ("config.json", "adapter_config.json")
"""Every directory that holds an HF model, or adapters, and nothing else has one of them."""


@contextlib.contextmanager
def staged_directory(final: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a staging directory; rename it to `final` at the end, or remove it on an error."""
    if final.is_dir() and not any(final.iterdir()):
        overwrite = True
    _check_free(final, overwrite)
    try:
        is_new = not final.parent.exists()
        final.parent.mkdir(parents=True, exist_ok=True)
        _clean_up_stale(final)
    except OSError as error:
        raise _unwritable(final, error) from None
    staging = final.parent / f".{final.name}{STAGING}{os.getpid()}"
    try:
        try:
            staging.mkdir()  # in here: Ctrl-C may come at once
        except OSError as error:
            raise _unwritable(final, error) from None
        yield staging
        fsync_tree(staging)
        _check_free(final, overwrite)  # another process may have committed first
        _replace(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):
                final.parent.rmdir()
        raise


def _unwritable(final: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{final}: cannot be written ({error.strerror})")


def _check_free(final: Path, overwrite: bool) -> None:
    """Raise if `final` exists and may not be replaced, or is not a model."""
    if not final.exists():
        return
    if final.is_file():
        raise ConfigError(f"{final}: is a file: give a directory")
    if not overwrite:
        raise ConfigError(f"{final}: exists already: choose another directory or give --overwrite")
    if CHECKPOINT.fullmatch(final.name):
        return
    entries = sorted(final.iterdir())
    others = [path.name for path in entries if path.is_dir()]
    if entries and not any((final / name).is_file() for name in CONFIGS):
        others += [path.name for path in entries if path.name not in others]
    if others:
        raise ConfigError(
            f"{final}: --overwrite replaces a model, and this holds other things, such as "
            f"{others[0]}: choose another directory"
        )


def atomic_write(path: Path, content: bytes) -> None:
    """Write a small file so that a reader sees the old or the new content, never a part."""
    staging = path.with_name(f".{path.name}{STAGING}{os.getpid()}")
    try:
        with staging.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)
    fsync_path(path.parent)


def atomic_write_text(path: Path, text: str) -> None:
    """Write a small text file that is never visible incomplete."""
    atomic_write(path, text.encode())


def fsync_path(path: Path) -> None:
    """Flush the content of a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Make the files and the names of a directory tree durable."""
    for parent, _, files in os.walk(folder):
        for name in files:
            fsync_path(Path(parent) / name)
        fsync_path(Path(parent))


def _replace(staging: Path, final: Path) -> None:
    """Rename; what is replaced can be restored until the rename has happened."""
    old = final.parent / f".{final.name}{OLD}{os.getpid()}"
    if final.exists():
        os.rename(final, old)
    os.rename(staging, final)
    fsync_path(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _clean_up_stale(final: Path) -> None:
    """Restore or remove what killed processes left behind."""
    for path in final.parent.glob(f".{final.name}{OLD}*"):
        if not final.exists() and not _is_running(path):
            os.rename(path, final)
    for path in final.parent.glob(f".{final.name}.*-*"):
        if path.name.startswith((f".{final.name}{STAGING}", f".{final.name}{OLD}")):
            if not _is_running(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_running(path: Path) -> bool:
    """Return whether the process that created a directory is still running."""
    try:
        os.kill(int(path.name.rpartition("-")[2]), 0)
    except PermissionError:
        return True
    except (ValueError, OSError, OverflowError):
        return False
    return True
