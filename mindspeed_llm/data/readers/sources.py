"""Which files an `--input` means."""

import logging
from dataclasses import dataclass
from pathlib import Path

from mindspeed.config import ConfigError

logger = logging.getLogger(__name__)

FORMATS = ("jsonl", "json", "parquet", "csv", "tsv", "txt")


@dataclass(frozen=True)
class Source:
    """One input file."""

    path: str
    format: str
    size: int
    modified: int


def find_sources(given: str | None) -> list[Source]:
    """Return the files meant by a file, a folder, or several of them with commas between."""
    if not given:
        raise ConfigError("--input is missing: give a file, a folder, or several with commas")
    names = [given] if Path(given).exists() else given.split(",")
    found = [source for name in names for source in _find(Path(name.strip()))]
    if all(source.size == 0 for source in found):
        raise ConfigError(f"--input {given} is empty: there is nothing to read")
    return found


def _find(path: Path) -> list[Source]:
    if path.is_dir():
        return _in_folder(path)
    if not path.is_file():
        raise ConfigError(f"--input {path} does not exist")
    if format_of(path) not in FORMATS:
        raise ConfigError(f"--input {path}: its name must end in {_endings()}")
    return [_source(path)]


def _in_folder(folder: Path) -> list[Source]:
    """Take every file of a known format in a folder, in the order of the names."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    # What an earlier run into the same folder noted is no data.
    files = [path for path in files if not path.name.endswith(".summary.json")]
    known = [path for path in files if format_of(path) in FORMATS]
    if not known:
        names = ", ".join(path.name for path in files[:5]) or "nothing"
        raise ConfigError(
            f"--input {folder} holds no file that ends in {_endings()}: it has {names}"
        )
    if len(known) < len(files):
        logger.info("%s: %d files of other kinds are left out", folder, len(files) - len(known))
    return [_source(path) for path in known]


def _source(path: Path) -> Source:
    try:
        status = path.stat()
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"--input {path} cannot be read: {error.strerror}") from None
    return Source(str(path), format_of(path), status.st_size, status.st_mtime_ns)


def format_of(path: str | Path) -> str:
    """Return the ending of a file's name, which says how it is read."""
    return Path(path).suffix.lower().removeprefix(".")


def _endings() -> str:
    return ", ".join(f".{name}" for name in FORMATS)
