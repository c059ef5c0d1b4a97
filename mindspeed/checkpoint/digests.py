"""Digests of the files of a checkpoint: written beside them, compared when they are read.

They detect damage (flipped bits, swapped files, another iteration), not an attacker, who can
change the digest with the file.
"""

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from mindspeed.config import ConfigError

logger = logging.getLogger(__name__)

NAME = "digests.json"
ALGORITHM = "xxh3_128"
SLICE = 1 << 20
"""Bytes hashed at a time: small enough to stay in the cache between the copy and the hash."""
PART = 64 << 20
"""Bytes of a part of a file that is written as one stream; parts are verified in parallel."""
READERS = 8
SMALL = 32 << 20
"""Bytes of the largest config or tokenizer."""
ITERATION = re.compile(r"iter_(\d{1,18})")
Ranges = Mapping[str, Iterable[tuple[int, int]]]
"""By file: (offset, length) of what will be read of it."""


@dataclass(frozen=True)
class FileRecord:
    """The digests of a file."""

    parts: tuple[tuple[int, str], ...]
    """(length, digest) of each part, from the first byte to the last."""

    @property
    def size(self) -> int:
        """Return the bytes of the file."""
        return sum(length for length, _ in self.parts)


class Hasher:
    """Digests a file that is written sequentially."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, str]] = []
        self._hash, self._length = xxhash.xxh3_128(), 0

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes, at most as many as fit in the cache."""
        view = memoryview(data)
        while len(view):
            taken = view[: PART - self._length]
            self._hash.update(taken)
            self._length += len(taken)
            view = view[len(taken) :]
            if self._length == PART:
                self._end_part()

    def record(self) -> FileRecord:
        """Return what has been written."""
        if self._length or not self._parts:
            self._end_part()
        return FileRecord(tuple(self._parts))

    def _end_part(self) -> None:
        self._parts.append((self._length, self._hash.hexdigest()))
        self._hash, self._length = xxhash.xxh3_128(), 0


def write_digests(
    folder: Path,
    written: Mapping[str, FileRecord],
    about: Mapping[str, Any],
    files: Mapping[str, Mapping[str, int]] | None = None,
) -> None:
    """Write the digests of a folder; files that are not in `written` are hashed now.

    `about` describes the folder, `files` single files of it.
    """
    listed = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != NAME:
            record = written.get(name) or _record_of(path)
            facts = dict((files or {}).get(name, {}))
            listed[name] = {"size": record.size, **facts, "parts": record.parts}
    content = {"algorithm": ALGORITHM, **about, "files": listed}
    (folder / NAME).write_text(_text(content), encoding="utf-8")


def _record_of(path: Path) -> FileRecord:
    hasher = Hasher()
    with path.open("rb") as file:
        while data := file.read(SLICE):
            hasher.update(data)
    return hasher.record()


def _text(content: Mapping[str, Any]) -> str:
    """Return the text of digests.json, which ends with the digest of all before it."""
    digest = xxhash.xxh3_128_hexdigest(json.dumps(content).encode())
    return json.dumps({**content, "digest": digest}) + "\n"


def read_digests(folder: Path) -> dict[str, FileRecord] | None:
    """Return the records of a folder by file name, None if it has no digests."""
    path = folder / NAME
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        content.pop("digest")
        if text != _text(content):
            raise ValueError("its bytes are not those that were written")
        if content["algorithm"] != ALGORITHM:
            raise ValueError(f"the algorithm is {content['algorithm']}, not {ALGORITHM}")
        iteration = content.get("iteration")
        files = {
            name: FileRecord(tuple((int(length), str(digest)) for length, digest in each["parts"]))
            for name, each in content["files"].items()
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: is damaged: {error}{_HELP}") from None
    named = ITERATION.fullmatch(folder.name)
    if named and iteration is not None and int(named[1]) != iteration:
        raise ConfigError(f"{path}: is of iteration {iteration}, not of the folder it is in{_HELP}")
    return files


_HELP = "; take the folder from a copy, or give --no-verify to use it as it is"


@dataclass(frozen=True)
class FileRange:
    """A range of a file with the digest it must have."""

    path: Path
    offset: int
    length: int
    digest: str

    def compute_digest(self) -> str:
        """Return the digest of what is on the disk."""
        state, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(SLICE, self.length)))
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            left = self.length
            while left and (count := file.readinto(buffer[:left])):
                state.update(buffer[:count])
                left -= count
        return state.hexdigest()


def verify(
    folder: Path,
    *,
    enabled: bool = True,
    ranges: Ranges | None = None,
    skip_suffix: str | None = None,
    is_shared: bool = False,
    is_expected: bool = True,
) -> dict[str, FileRecord] | None:
    """Compare the files of a folder with their digests; damage is an error that names the file.

    Of the files in `ranges` only these ranges are read; of files whose names end with `skip_suffix`
    only the size is checked. With `is_shared`, every rank calls this and reads a share. A folder
    without digests is accepted, with a warning where they are expected.
    """
    files = read_digests(folder) if enabled else None
    if files is None:
        if enabled and is_expected:
            logger.warning("%s: has no %s: damage to its files is not detected", folder, NAME)
        return None
    _check_sizes(folder, files)
    read = {
        name: record
        for name, record in files.items()
        if skip_suffix is None or not name.endswith(skip_suffix)
    }
    rank, world = 0, 1
    if is_shared:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    checked = list(file_ranges(folder, read, ranges or {}))[rank::world]
    damage = _damage(checked, folder, files)
    if world > 1:
        everywhere: list[str] = [""] * world
        torch.distributed.all_gather_object(everywhere, damage)
        damage = next(filter(None, everywhere), "")
    if damage:
        raise ConfigError(damage)
    return files


def verify_small(folder: Path | None, *, enabled: bool = True) -> None:
    """Verify the small files of a folder, such as a config, before anything follows from them."""
    if folder is None or not enabled or (files := read_digests(folder)) is None:
        return
    _check_sizes(folder, files)
    small = {name: record for name, record in files.items() if record.size <= SMALL}
    if damage := _damage(list(file_ranges(folder, small, {})), folder, files):
        raise ConfigError(damage)


def _check_sizes(folder: Path, files: Mapping[str, FileRecord]) -> None:
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            raise ConfigError(f"{path}: is missing, but {NAME} lists it{_HELP}")
        if (size := path.stat().st_size) != record.size:
            what = "is cut off" if size < record.size else "is too long"
            raise ConfigError(f"{path}: {what}: {size} bytes, not {record.size}{_HELP}")


def file_ranges(
    folder: Path, files: Mapping[str, FileRecord], ranges: Ranges
) -> Iterator[FileRange]:
    """Yield the ranges to verify: of a file in `ranges`, the parts that these overlap."""
    for name, record in files.items():
        wanted = sorted(ranges[name]) if name in ranges else [(0, record.size)]
        start, number = 0, 0
        for length, digest in record.parts:
            while number < len(wanted) and sum(wanted[number]) <= start:
                number += 1
            if number < len(wanted) and wanted[number][0] < start + length:
                yield FileRange(folder / name, start, length, digest)
            start += length


def _damage(checked: list[FileRange], folder: Path, files: Mapping[str, FileRecord]) -> str:
    """Return what is wrong with the first damaged range, an empty string if there is none."""
    with ThreadPoolExecutor(min(READERS, max(2, os.cpu_count() or 1))) as pool:
        try:
            for each, found in zip(checked, pool.map(FileRange.compute_digest, checked)):
                if found != each.digest:
                    return mismatch_message(each, found, folder, files)
        except OSError as error:
            return f"{error.filename or folder}: cannot be read ({error.strerror})"
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return ""


def mismatch_message(
    damaged: FileRange, found: str, folder: Path, files: Mapping[str, FileRecord]
) -> str:
    """Return the error for a range with another digest than its own."""
    part = (damaged.length, found)
    others = [name for name, record in files.items() if part in record.parts]
    what = f"holds what belongs to {folder / others[0]}" if others else "is damaged"
    return f"{damaged.path}: {what}: its bytes are not those that were written{_HELP}"
