"""Files to be written: what is in them is known before the first byte, and streamed into them."""

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from typing import Any, BinaryIO, Protocol, cast

import torch

from mindspeed.checkpoint.digests import FileRecord, write_digests
from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.assembly import Stored, Wholes
from mindspeed_llm.checkpoint.direct_file import DirectFile
from mindspeed_llm.checkpoint.pt_file import PtTensor, write_pt
from mindspeed_llm.checkpoint.safetensors_file import EXPORTED, FORMAT, header_bytes
from mindspeed_llm.checkpoint.stream import blocks, new_buffer

LET_GO = 256 << 20
"""Bytes after which the memory of what has been read is given back."""

Progress = Callable[[int, int], None]
"""Takes the bytes just written and the bytes to be written in all."""
Blocks = Callable[[Stored, torch.dtype], Iterator[memoryview]]
"""Yields the bytes of a tensor."""


class Weights(Protocol):
    """Where the numbers come from."""

    @property
    def wholes(self) -> Wholes:
        """Return the weights by name."""

    def let_go(self) -> None:
        """Give back the memory of what has been read."""


class Output(Protocol):
    """A file that can be written."""

    @property
    def path(self) -> Path:
        """Return where it will be."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of its tensors."""

    def write(self, file: BinaryIO, stream: Blocks) -> None:
        """Write everything."""


@dataclass(frozen=True)
class PtOutput:
    """A torch.save file with the tensors of one rank."""

    path: Path
    models: dict[str, list[tuple[Stored, torch.dtype]]]
    """For each model in the file its tensors."""
    values: dict[str, Any]
    """What stands beside the models."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Which rank's it is, by kind of parallelism."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of its tensors."""
        return sum(_nbytes(*tensor) for model in self.models.values() for tensor in model)

    def write(self, file: BinaryIO, stream: Blocks) -> None:
        """Write everything."""
        tensors: dict[PtTensor, tuple[Stored, torch.dtype]] = {}
        models: dict[str, dict[str, PtTensor]] = {}
        for key, model in self.models.items():
            models[key] = {}
            for stored, dtype in model:
                models[key][stored.name] = PtTensor(dtype, stored.shape)
                tensors[models[key][stored.name]] = (stored, dtype)
        write_pt(file, self.values | models, lambda tensor: stream(*tensors[tensor]))


@dataclass(frozen=True)
class SafetensorsOutput:
    """A .safetensors file."""

    path: Path
    tensors: Sequence[tuple[Stored, torch.dtype]]
    is_export: bool = False
    """Whether it says that it is ours, so that the next export may replace it."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of its tensors."""
        return sum(_nbytes(*tensor) for tensor in self.tensors)

    def write(self, file: BinaryIO, stream: Blocks) -> None:
        """Write everything."""
        described = [(stored.name, dtype, stored.shape) for stored, dtype in self.tensors]
        file.write(header_bytes(described, EXPORTED if self.is_export else FORMAT))
        for stored, dtype in self.tensors:
            for block in stream(stored, dtype):
                file.write(block)


class Writer:
    """Writes files from a source, several at a time; each is on the disk when it is done."""

    def __init__(
        self,
        source: Weights,
        progress: Callable[[int], None] | None = None,
        *,
        check_finite: bool = False,
    ) -> None:
        self._source = source
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

        def stream(stored: Stored, dtype: torch.dtype) -> Iterator[memoryview]:
            pieces = stored.pieces(self._source.wholes)
            for block in blocks(stored.viewed, pieces, dtype, buffer):
                if self._check_finite and len(block):
                    must_be_finite(stored.name, torch.frombuffer(block, dtype=dtype))
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
            if self._unreleased > LET_GO:
                self._unreleased = 0
                self._source.let_go()
            if self._progress is not None:
                self._progress(size)


def write_outputs(
    outputs: Sequence[Output],
    source: Weights,
    disk: Path,
    progress: Progress | None,
    *,
    check_finite: bool = False,
) -> dict[Path, FileRecord]:
    """Stream every file and return their digests; a full disk is an error before the first byte."""
    needed = sum(output.nbytes for output in outputs)
    free = shutil.disk_usage(disk).free
    full = f"{disk}: {needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free"
    if needed > free:
        raise ConfigError(f"{full}: free some space or choose another --save-dir")
    try:
        count = progress and (lambda size: progress(size, needed))
        return Writer(source, count, check_finite=check_finite).write(outputs)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ConfigError(f"{full}: {error.strerror}; what was written is removed") from None
        raise ConfigError(f"{disk}: cannot be written ({error.strerror})") from None


def must_be_finite(name: str, values: torch.Tensor) -> None:
    """Raise if a tensor holds what no trained weight is."""
    if not bool(torch.isfinite(values).all()):
        raise ConfigError(
            f"{name}: holds NaN or infinity: take weights from before that, or leave out "
            "--check-finite"
        )


def write_folder_digests(
    folder: Path, written: dict[Path, FileRecord], outputs: Sequence[Output], **about: Any
) -> None:
    """Write the digests of a converted folder, and which rank's each file is."""
    names = {path: path.relative_to(folder).as_posix() for path in written}
    write_digests(
        folder,
        {names[path]: record for path, record in written.items()},
        {"kind": "converted", **about},
        {names[output.path]: getattr(output, "ranks", {}) for output in outputs},
    )


def typed(
    stored: Sequence[Stored], wholes: Wholes, wanted: torch.dtype | None
) -> list[tuple[Stored, torch.dtype]]:
    """Return tensors with the types they will have: the wanted one, else that of their source."""
    return [(tensor, tensor.dtype(wholes, wanted)) for tensor in stored]


def _nbytes(stored: Stored, dtype: torch.dtype) -> int:
    return math.prod(stored.shape) * dtype.itemsize
