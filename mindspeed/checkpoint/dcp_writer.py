"""Writers of distributed checkpoints that digest what they write, as they write it."""

import io
import threading
from collections.abc import Iterable
from typing import IO, Any

import xxhash
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from mindspeed.checkpoint.digests import SLICE, FileRecord


class _DigestedStream(io.IOBase):
    """Writes an entry to a file; when it is closed its digest is in `digests`."""

    def __init__(self, raw: Any, digests: list[str]) -> None:
        self._raw, self._digests, self._hash = raw, digests, xxhash.xxh3_128()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write through; large writes are hashed at the same time, on a thread."""
        view = memoryview(data).cast("B")
        if len(view) < SLICE:
            self._hash.update(view)
            self._raw.write(view)
            return len(view)
        hashing = threading.Thread(target=self._hash.update, args=(view,))
        hashing.start()
        try:
            self._raw.write(view)
        finally:
            hashing.join()
        return len(view)

    def close(self) -> None:
        """End the entry; the file stays open for the next."""
        if not self._digests:
            self._raw.flush()
            self._digests.append(self._hash.hexdigest())


class DigestTransforms(_StorageWriterTransforms):
    """Give torch streams that digest what is written.

    A digest comes back from whichever process wrote in `transform_descriptors`, the list of
    transformation names, which is otherwise empty; `collect_digests` removes it again.
    """

    def transform_save_stream(
        self, write_item: WriteItem, raw_stream: io.IOBase
    ) -> tuple[IO[bytes], list[str]]:
        """Return the stream for an entry and the list that will hold its digest."""
        digests: list[str] = []
        return _DigestedStream(raw_stream, digests), digests  # type: ignore[return-value]


def collect_digests(results: Iterable[Iterable[WriteResult]]) -> dict[str, FileRecord]:
    """Remove the digests from the results of all ranks and return them by file."""
    parts: dict[str, list[tuple[int, int, str]]] = {}
    for result in (each for rank in results for each in rank):
        info = result.storage_data
        if info.transform_descriptors:
            (digest,) = info.transform_descriptors
            parts.setdefault(info.relative_path, []).append((info.offset, info.length, digest))
            info.transform_descriptors = None
    return {
        name: FileRecord(tuple((length, digest) for _, length, digest in sorted(found)))
        for name, found in parts.items()
    }


class DigestWriter(FileSystemWriter):
    """torch's writer; on rank 0 `files` holds the digests of what all ranks have written."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.transforms = DigestTransforms()
        self.files: dict[str, FileRecord] = {}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, without the digests."""
        self.files = collect_digests(results)
        super().finish(metadata, results)


def digest_writes(writer: Any, files: dict[str, FileRecord]) -> None:
    """Make a writer that Megatron created digest as well, and fill `files` on rank 0."""
    if not hasattr(writer, "transforms"):
        return  # an older torch: the files are read once more to be hashed
    original = writer.finish
    writer.transforms = DigestTransforms()

    def finish(metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files.update(collect_digests(results))
        original(metadata, results)

    writer.finish = finish
