"""Load a torch.distributed.checkpoint from verified metadata, and objects as weights only.

torch itself unpickles .metadata, and every entry that is not a tensor. What is handed to it here
has been rebuilt from verified records, and entries are loaded with `weights_only=True`. Entries are
compared with their digests as they are loaded, so that no file is read twice.
"""

import functools
import io
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from mindspeed.checkpoint.digests import (
    FileRange,
    FileRecord,
    file_ranges,
    mismatch_message,
    verify,
)
from mindspeed.checkpoint.file_io import FileRangeReader
from mindspeed.config import ConfigError

EXTRA_STATE = "_extra_state"
"""Part of the name of a layer's extra state: FP8 scales of Transformer Engine."""
SUFFIX = ".distcp"
"""Of files that hold entries; all others are small."""
LARGE = 1 << 20
"""Bytes of a read that is hashed while it is in progress: the values of a tensor."""
STEP = 2 << 20
"""Bytes that are read while those before them are hashed."""


class EntryVerifier:
    """Compares what one rank loads with its digests, one entry after the other."""

    def __init__(self, folder: Path, files: Mapping[str, FileRecord]) -> None:
        self._folder, self._files = folder, files
        shards = {name: record for name, record in files.items() if name.endswith(SUFFIX)}
        self._ranges = {(r.path, r.offset): r for r in file_ranges(folder, shards, {})}
        self._verified: set[FileRange] = set()
        self._file: BinaryIO | None = None
        self._entry: _EntryReader | None = None
        self._thread = ThreadPoolExecutor(1)

    def open(self, name: str, offset: int, length: int) -> "_EntryReader | None":
        """Return a reader of the next entry, None if it is verified; finish the previous one."""
        self._end_entry()
        path = self._folder / name
        entry = self._ranges.get((path, offset))
        if entry is None or entry.length != length:  # the writer digested the file as one stream
            record = {name: self._files[name]} if name in self._files else {}
            for each in file_ranges(self._folder, record, {name: [(offset, length)]}):
                self._compare(each, each.compute_digest)
            return None
        if entry in self._verified:  # after a change of layout several tensors share an entry
            return None
        if self._file is None or self._file.name != str(path):
            self._close()
            self._file = path.open("rb", buffering=0)
        self._entry = _EntryReader(self._file, entry, self._thread)
        return self._entry

    def finish(self) -> None:
        """Verify the last entry, whether it could be loaded or not."""
        try:
            self._end_entry()
        finally:
            self._close()

    def _end_entry(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._compare(entry.range, entry.compute_digest)

    def _compare(self, checked: FileRange, compute_digest: Callable[[], str]) -> None:
        if checked not in self._verified:
            if (found := compute_digest()) != checked.digest:
                raise ConfigError(mismatch_message(checked, found, self._folder, self._files))
            self._verified.add(checked)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _EntryReader(FileRangeReader):
    """An entry of a file, hashed as torch reads it; torch reads the values of a tensor at once.

    Their digest is made of the bytes that torch gets. The few before and after them, which it
    reads in another order, are read once more.
    """

    def __init__(self, file: BinaryIO, entry: FileRange, thread: ThreadPoolExecutor) -> None:
        super().__init__(functools.partial(_read_at, file), entry.offset, entry.length)
        self.range = entry
        self._thread = thread
        self._hash, self._hashed = xxhash.xxh3_128(), 0

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes."""
        view = self._remaining(buffer)
        if len(view) < LARGE or self._position < self._hashed:
            return self._advance(view)
        self._hash_until(self._position)
        start, last = self._position, None
        try:
            while len(view) and (count := self._advance(view[:STEP])):
                last = self._thread.submit(self._hash.update, view[:count])
                view = view[count:]
        finally:
            if last is not None:
                last.result()  # the buffer is torch's: it may be gone after this
        self._hashed = self._position
        return self._position - start

    def compute_digest(self) -> str:
        """Return the digest of the whole entry."""
        self._hash_until(self._length)
        return self._hash.hexdigest()

    def _hash_until(self, stop: int) -> None:
        if self._hashed >= stop:
            return
        buffer = memoryview(bytearray(min(LARGE, stop - self._hashed)))
        while self._hashed < stop:
            view = buffer[: stop - self._hashed]
            if not (count := self._read_at(view, self._start + self._hashed)):
                break
            self._hash.update(view[:count])
            self._hashed += count


def _read_at(file: BinaryIO, buffer: memoryview, offset: int) -> int:
    return os.preadv(file.fileno(), [buffer], offset)


def verify_except_entries(folder: Path, *, enabled: bool) -> EntryVerifier | None:
    """Verify the files without entries, all ranks together; entries follow as they are loaded."""
    files = verify(folder, enabled=enabled, skip_suffix=SUFFIX, is_shared=True)
    return None if files is None else EntryVerifier(folder, files)


@contextmanager
def weights_only(
    folder: Path, metadata: Metadata, entries: EntryVerifier | None = None
) -> Iterator[None]:
    """Make every load in this block safe: Megatron creates its reader and planner itself.

    Its classes differ between versions, but all inherit these methods of torch. `torch.load` is
    covered because Megatron opens common.pt itself, with `weights_only=False` in 0.12. With
    `entries`, what is loaded has to match their digests.
    """
    original_load = torch.load
    original_slice, original_read = FileSystemReader._slice_file, FileSystemReader.read_data

    def read_metadata(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
        if Path(self.path) != folder:
            raise ConfigError(f"{self.path}: is read while {folder} is being loaded")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def slice_file(self: FileSystemReader, file: Any, sinfo: Any) -> Any:
        entry = entries and entries.open(sinfo.relative_path, sinfo.offset, sinfo.length)
        return entry or original_slice(self, file, sinfo)

    def read_data(self: FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> Any:
        try:
            return original_read(self, plan, planner)
        finally:
            if entries is not None:
                entries.finish()  # its error replaces one that the same damage has caused

    def load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
        _load_entry(folder, self, read_item, value)

    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original_load(f, *args, **kwargs | {"weights_only": True})
        except Exception as error:
            if isinstance(f, str | os.PathLike):
                raise ConfigError(f"{f}: cannot be loaded safely ({_first_line(error)})") from None
            raise

    with (
        _replaced(FileSystemReader, "read_metadata", read_metadata),
        _replaced(FileSystemReader, "_slice_file", slice_file),
        _replaced(FileSystemReader, "read_data", read_data),
        _replaced(DefaultLoadPlanner, "load_bytes", load_bytes),
        _replaced(torch, "load", load),
    ):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _load_entry(
    folder: Path, planner: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO
) -> None:
    """Do what DefaultLoadPlanner.load_bytes does, without running what is in the entry."""
    name = read_item.dest_index.fqn
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            loaded = torch.load(value, map_location="cpu", weights_only=True)
        if EXTRA_STATE in name:
            loaded = _without_scales(loaded)
    except Exception as error:
        assert planner.metadata is not None
        file = planner.metadata.storage_data[read_item.storage_index].relative_path
        raise ConfigError(
            f"{folder / file}: the entry {name} cannot be loaded safely ({_first_line(error)})"
        ) from None
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], loaded)
    else:
        planner.state_dict[name] = loaded


def _without_scales(value: Any) -> Any:
    """Return an extra state without its bytes, which Megatron's grouped experts unpickle.

    The layers of this run have no FP8 scales to fill, so nothing that is used is lost.
    """
    if isinstance(value, list):
        return [_without_scales(each) for each in value]
    if value is None:
        return None
    if not isinstance(value, torch.Tensor | io.BytesIO):
        raise ConfigError(f"it holds a {type(value).__name__}, not the bytes of FP8 scales")
    return torch.empty(0, dtype=torch.uint8)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
