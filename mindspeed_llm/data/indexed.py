"""Megatron's indexed token files: `.bin` holds tokens, `.idx` where each sequence begins.

An `.idx` is: 9 bytes of magic, u64 version 1, u8 dtype code, u64 sequence count, u64 document
count + 1, int32 lengths, int64 byte offsets, int64 document boundaries (the first is 0).
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mindspeed.checkpoint.commit import fsync_path
from mindspeed.config import ConfigError

Array = npt.NDArray[Any]
IGNORE_INDEX = -100
"""The label of tokens that are not trained."""
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""The types of token ids; Megatron also numbers floats (6 and 7), which no token id is."""
FSYNC_BYTES = 16 << 20
"""Bytes of tokens that are written between two flushes to the disk."""
MAX_LISTED = 10
"""Prefixes in a folder that an error lists."""
CHUNK = 1 << 20
"""Sequences handled at once where an index may be larger than memory."""


def smallest_dtype(vocabulary: int) -> np.dtype[Any]:
    """Return the type Megatron stores token ids in: two bytes where the vocabulary allows it."""
    return np.dtype("<u2" if vocabulary < 65500 else "<i4")


class IndexedTokens:
    """Sequences of one `.bin`/`.idx` pair, checked when opened and read in place."""

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        index_path, data_path = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        for path in (index_path, data_path):
            if not path.is_file():
                raise ConfigError(f"{path} does not exist: {self.prefix} needs a .bin and an .idx")
        self._read_index(index_path)
        size = data_path.stat().st_size
        self._check(index_path, data_path, size)
        self._data = np.memmap(data_path, np.uint8, "r") if size else np.zeros(0, np.uint8)

    def _read_index(self, path: Path) -> None:
        head = path.open("rb").read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise ConfigError(f"{path} is not an index of tokens: it does not start with MMIDIDX")
        _, version, code, sequences, documents = HEADER.unpack(head)
        if version != 1 or code not in CODES or documents < 1:
            raise ConfigError(
                f"{path} is damaged: version {version} (known: 1), type {code} (token ids: "
                f"{', '.join(map(str, CODES))}), {documents} document boundaries: preprocess again"
            )
        expected = HEADER.size + 12 * sequences + 8 * documents
        # Multimodal indices carry one more byte per sequence, which is of no use for text.
        if path.stat().st_size not in (expected, expected + sequences):
            raise ConfigError(
                f"{path} is damaged: {sequences} sequences need {expected} bytes, "
                f"it has {path.stat().st_size}"
            )
        content = np.memmap(path, np.uint8, "r")
        starts = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * documents])
        self.dtype = CODES[code]
        self.lengths: Array = content[starts[0] : starts[1]].view("<i4")
        self.offsets: Array = content[starts[1] : starts[2]].view("<i8")
        self.documents: Array = content[starts[2] : starts[3]].view("<i8")

    def _check(self, index_path: Path, data_path: Path, size: int) -> None:
        """Refuse an index whose sequences are not contiguous or do not fill the data."""
        end = 0
        for start in range(0, len(self.lengths), CHUNK):
            lengths = self.lengths[start : start + CHUNK].astype(np.int64)
            ends = end + np.cumsum(lengths) * self.dtype.itemsize
            starts = np.concatenate(([end], ends[:-1]))
            wrong = (self.offsets[start : start + CHUNK] != starts) | (lengths < 0) | (ends > size)
            if wrong.any():
                raise _mismatch(index_path, data_path, f"sequence {start + int(wrong.argmax())}")
            end = int(ends[-1])
        if end != size:
            raise _mismatch(index_path, data_path, f"it ends at byte {end} of {size} and")
        ends = self.documents
        if ends[0] != 0 or ends[-1] > len(self.lengths) or (np.diff(ends) < 0).any():
            raise ConfigError(f"{index_path} is damaged: its document boundaries are out of order")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Array:
        start, count = int(self.offsets[index]), int(self.lengths[index])
        return self._data[start : start + count * self.dtype.itemsize].view(self.dtype)

    def __iter__(self) -> Iterator[Array]:
        return (self[index] for index in range(len(self)))

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences."""
        return int(self.lengths.sum(dtype=np.int64))

    def distinct_values(self, *, without: int | None = None) -> list[int]:
        """Return the values that occur, except perhaps one."""
        values = self._data.view(self.dtype)
        found: set[int] = set()
        for start in range(0, len(values), CHUNK):
            found |= set(np.unique(values[start : start + CHUNK]).tolist())
        return sorted(value for value in found if value != without)


def _mismatch(index_path: Path, data_path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{index_path}: {what} does not fit {data_path}: one of them is damaged or belongs to "
        "another run; preprocess again"
    )


class TokenWriter:
    """Appends sequences to files in a work folder; `build_index` makes the index of them.

    Lengths and document ends go to files of their own, so that memory does not grow with the
    data, and so that truncating each file to an earlier size restores the writer of that moment.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._paths = [folder / f"{name}.{kind}" for kind in ("bin", "lengths", "borders")]
        # Unbuffered: after the disk was full, closing must not try to write what remains.
        self._files = [open(path, "ab", buffering=0) for path in self._paths]
        self._sequences = self._paths[1].stat().st_size // 4
        self._unsynced = 0

    @property
    def data_path(self) -> Path:
        """The file of tokens."""
        return self._paths[0]

    @property
    def lengths_path(self) -> Path:
        """The file of lengths."""
        return self._paths[1]

    def append(self, tokens: Array, lengths: Array, document_ends: Array | None = None) -> None:
        """Append the sequences that are concatenated in `tokens`.

        `document_ends` counts the sequences up to the end of each document, within this call;
        without it every sequence is a document.
        """
        if document_ends is None:
            document_ends = np.arange(1, len(lengths) + 1, dtype=np.int64)
        parts = (
            np.ascontiguousarray(tokens, self.dtype),
            np.ascontiguousarray(lengths, "<i4"),
            np.ascontiguousarray(document_ends + self._sequences, "<i8"),
        )
        for file, part in zip(self._files, parts):
            _write_all(file, part.view(np.uint8).data)
        self._sequences += len(lengths)
        self._unsynced += parts[0].nbytes
        if self._unsynced > FSYNC_BYTES:
            # Now, while workers encode, rather than all at the end.
            os.fsync(self._files[0].fileno())
            self._unsynced = 0

    def sizes(self) -> dict[str, int]:
        """Flush everything to the disk and return the name and size of each file."""
        for file in self._files:
            os.fsync(file.fileno())
        return {path.name: file.tell() for path, file in zip(self._paths, self._files)}

    def truncate(self, sizes: Mapping[str, int]) -> None:
        """Restore the state when `sizes` was taken; without an entry, the empty state."""
        for path, file in zip(self._paths, self._files):
            file.truncate(sizes.get(path.name, 0))
            file.seek(0, os.SEEK_END)
        self._sequences = self._paths[1].stat().st_size // 4

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def build_index(self, path: Path) -> None:
        """Write the index of everything that was appended, and close."""
        self.sizes()
        self.close()
        _, lengths_path, ends_path = self._paths
        documents = ends_path.stat().st_size // 8 + 1
        code = next(code for code, dtype in CODES.items() if dtype == self.dtype)
        with open(path, "wb") as file:
            file.write(HEADER.pack(MAGIC, 1, code, self._sequences, documents))
            for lengths in _chunks(lengths_path, "<i4"):
                file.write(lengths.tobytes())
            end = 0
            for lengths in _chunks(lengths_path, "<i4"):
                ends = end + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
                starts = np.concatenate(([end], ends[:-1]))
                file.write(starts.astype("<i8").tobytes())
                end = int(ends[-1])
            file.write(bytes(8))
            for ends in _chunks(ends_path, "<i8"):
                file.write(ends.tobytes())
            file.flush()
            os.fsync(file.fileno())
        fsync_path(path.parent)


def _write_all(file: io.FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _chunks(path: Path, dtype: str) -> Iterator[Array]:
    """Read a file of numbers a chunk at a time."""
    with open(path, "rb") as file:
        while len(chunk := np.fromfile(file, dtype, CHUNK)):
            yield chunk


BLOCK = 1 << 18
"""Tokens checked at once: they stay in the processor's cache."""


class TokenFile(NamedTuple):
    """A file of token ids, or of labels, which may be IGNORE_INDEX too."""

    path: Path
    dtype: np.dtype[Any]
    is_labels: bool = False


def describe_folder(folder: Path, names: Iterable[str]) -> str:
    """Return the error for a folder in place of a prefix: the prefixes of that kind in it."""
    found = [str(folder / name) for name in sorted(set(names))]
    shown = ", ".join(found[:MAX_LISTED])
    more = f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    hint = f"it holds {shown}{more}" if found else "it holds none"
    return f"{folder} is a folder: give the prefix of data in it ({hint})"


def find_out_of_range(
    file: TokenFile, vocabulary: int, share: tuple[int, int] = (0, 1)
) -> tuple[int, int] | None:
    """Return the position and the value of an id outside 0 .. vocabulary - 1, None without one.

    It is one pass, a tenth of a second a gigabyte. `share` is (number, count): of that many equal
    parts of the file only one is checked.
    """
    if not file.path.stat().st_size:
        return None
    tokens = np.memmap(file.path, file.dtype, "r")
    number, count = share
    first, last = (len(tokens) * part // count for part in (number, number + 1))
    for start in range(first, last, BLOCK):
        block = tokens[start : min(start + BLOCK, last)]
        if _may_hold_invalid(block, vocabulary, file.is_labels):
            wrong = (block < 0) | (block >= vocabulary)
            if file.is_labels:
                wrong &= block != IGNORE_INDEX
            if wrong.any():
                offset = int(wrong.argmax())
                return start + offset, int(block[offset])
    return None


def _may_hold_invalid(block: Array, vocabulary: int, is_labels: bool) -> bool:
    """Return whether a block may hold an invalid id; negative ids are large when unsigned."""
    ids = block.view(f"<u{block.dtype.itemsize}")
    if not is_labels:
        return bool(ids.max() >= vocabulary)
    # IGNORE_INDEX becomes 0, what lies between it and 0 becomes 1 to 99, a token 100 or more.
    ids = ids + ids.dtype.type(-IGNORE_INDEX)
    between = ids - ids.dtype.type(1) < -IGNORE_INDEX - 1
    return bool(ids.max() >= vocabulary - IGNORE_INDEX or between.any())
