"""Write checkpoint files whose content is planned before the first byte and streamed into them."""

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event, Lock
from typing import Any, BinaryIO, Protocol, cast

import torch

from mindspeed.checkpoint.assembly import FullTensors, StoredTensor
from mindspeed.checkpoint.digests import FileRecord, write_digests
from mindspeed.checkpoint.file_io import DirectFile, aligned
from mindspeed.checkpoint.tensor_slice import TensorSlice
from mindspeed.config import ConfigError

BLOCK = 8 << 20
"""Bytes that are assembled at a time."""
RELEASE_AFTER = 256 << 20
"""Bytes written after which the pages of what has been read are released."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Values of --params-dtype."""

Progress = Callable[[int, int], None]
"""Called with the bytes just written and the total to be written."""
TypedTensor = tuple[StoredTensor, torch.dtype]
Blocks = Callable[[StoredTensor, torch.dtype], Iterator[memoryview]]
"""Yields the bytes of a tensor."""
Piece = tuple[TensorSlice, torch.Tensor]


class TensorSource(Protocol):
    """Where the values come from."""

    @property
    def tensors(self) -> FullTensors:
        """Return the full tensors by name."""

    def release_pages(self) -> None:
        """Release the memory of what has been read."""


class Output(Protocol):
    """A file that can be written."""

    @property
    def path(self) -> Path:
        """Return its path."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of its tensors."""

    def write(self, file: BinaryIO, stream: Blocks) -> None:
        """Write the whole file."""


class Writer:
    """Writes files from a source, several at a time; each is durable when it is done."""

    def __init__(
        self,
        source: TensorSource,
        total: int = 0,
        progress: Progress | None = None,
        *,
        check_finite: bool = False,
    ) -> None:
        self._source = source
        self._total = total
        self._progress = progress
        self._check_finite = check_finite
        self._stop = Event()
        self._lock = Lock()
        self._unreleased = 0

    def write(self, outputs: Sequence[Output]) -> dict[Path, FileRecord]:
        """Write all files or raise the first error; on an error the others stop soon."""
        workers = max(1, min(len(outputs), os.cpu_count() or 1))
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(self._write, output) for output in outputs]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                self._stop.set()
                for future in futures:
                    future.cancel()
            return dict(future.result() for future in done)

    def _write(self, output: Output) -> tuple[Path, FileRecord]:
        output.path.parent.mkdir(parents=True, exist_ok=True)
        buffer = new_buffer()

        def stream(stored: StoredTensor, dtype: torch.dtype) -> Iterator[memoryview]:
            pieces = stored.pieces(self._source.tensors)
            for block in blocks(stored.view_shape, pieces, dtype, buffer):
                if self._check_finite and len(block):
                    require_finite(stored.name, torch.frombuffer(block, dtype=dtype))
                yield block
                self._count(len(block))

        with DirectFile(output.path) as file:
            output.write(cast(BinaryIO, file), stream)
        return output.path, file.record()

    def _count(self, size: int) -> None:
        if self._stop.is_set():
            raise InterruptedError("another file could not be written")
        with self._lock:
            self._unreleased += size
            if self._unreleased > RELEASE_AFTER:
                self._unreleased = 0
                self._source.release_pages()
            if self._progress is not None:
                self._progress(size, self._total)


def write_outputs(
    outputs: Sequence[Output],
    source: TensorSource,
    disk: Path,
    progress: Progress | None,
    *,
    check_finite: bool = False,
) -> dict[Path, FileRecord]:
    """Stream every file and return their digests; a full disk is an error before the first byte."""
    needed = sum(output.nbytes for output in outputs)
    free = check_disk_space(needed, disk)
    writer = Writer(source, needed, progress, check_finite=check_finite)
    try:
        return writer.write(outputs)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ConfigError(
                f"{disk}: {needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free: "
                f"{error.strerror}; what was written is removed"
            ) from None
        raise ConfigError(f"{disk}: cannot be written ({error.strerror})") from None


def check_disk_space(needed: int, disk: Path) -> int:
    """Return the free bytes on the disk of a directory; raise if they are fewer than needed."""
    free = shutil.disk_usage(disk).free
    if needed > free:
        raise ConfigError(
            f"{disk}: {needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free: free some "
            "space or choose another --save-dir"
        )
    return free


def require_finite(name: str, values: torch.Tensor) -> None:
    """Raise if a tensor holds NaN or infinity."""
    if not bool(torch.isfinite(values).all()):
        raise ConfigError(
            f"{name}: holds NaN or infinity: take weights from before that, or leave out "
            "--check-finite"
        )


def write_folder_digests(
    folder: Path, written: dict[Path, FileRecord], outputs: Sequence[Output], **about: Any
) -> None:
    """Write the digests of a converted folder with the ranks that each file belongs to."""
    names = {path: path.relative_to(folder).as_posix() for path in written}
    write_digests(
        folder,
        {names[path]: record for path, record in written.items()},
        {"kind": "converted", **about},
        {names[output.path]: getattr(output, "ranks", {}) for output in outputs},
    )


def with_dtypes(
    stored: Sequence[StoredTensor], tensors: FullTensors, requested: torch.dtype | None
) -> list[TypedTensor]:
    """Pair tensors with the dtypes to write: the requested one, else that of their source."""
    return [(tensor, tensor.dtype(tensors, requested)) for tensor in stored]


def tensor_nbytes(stored: StoredTensor, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor."""
    return math.prod(stored.shape) * dtype.itemsize


def new_buffer() -> torch.Tensor:
    """Return the scratch memory of `blocks`; one for each thread."""
    return torch.empty(BLOCK, dtype=torch.uint8)


def blocks(
    shape: tuple[int, ...], pieces: list[Piece], dtype: torch.dtype, buffer: torch.Tensor
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order; consume each block before taking the next.

    What lies in memory as it will in the file is not copied.
    """
    if len(shape) > 2:
        for number in range(shape[0]):
            inner = [
                (region[1:], values[number - region[0][0]])
                for region, values in pieces
                if region[0][0] <= number < region[0][1]
            ]
            yield from blocks(shape[1:], inner, dtype, buffer)
        return
    matrix = (shape[0], 1) if len(shape) == 1 else (shape[0], shape[1])
    if len(shape) == 1:
        pieces = [((region[0], (0, 1)), values.unsqueeze(1)) for region, values in pieces]
    borders = sorted({row for region, _ in pieces for row in region[0]})
    for start, stop in zip(borders, borders[1:]):
        active = [piece for piece in pieces if piece[0][0][0] <= start < piece[0][0][1]]
        yield from _rows(matrix[1], active, (start, stop), dtype, buffer)


def _rows(
    width: int,
    pieces: list[Piece],
    rows: tuple[int, int],
    dtype: torch.dtype,
    buffer: torch.Tensor,
) -> Iterator[memoryview]:
    """Yield rows to which every piece contributes."""
    start, stop = rows
    columns = [
        (region[1], values[start - region[0][0] : stop - region[0][0]]) for region, values in pieces
    ]
    is_ready = len(columns) == 1 and columns[0][1].dtype == dtype and columns[0][1].is_contiguous()
    step = max(1, min(BLOCK, buffer.numel()) // (width * dtype.itemsize))
    if buffer.numel() < width * dtype.itemsize:
        buffer = torch.empty(width * dtype.itemsize, dtype=torch.uint8)
    for first in range(0, stop - start, step):
        last = min(first + step, stop - start)
        if is_ready:
            yield _bytes(columns[0][1][first:last])
            continue
        block = buffer[: (last - first) * width * dtype.itemsize].view(dtype)
        block = block.view(last - first, width)
        for (left, right), values in columns:
            block[:, left:right].copy_(aligned(values[first:last]))
        yield _bytes(block)


def _bytes(values: torch.Tensor) -> memoryview:
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
