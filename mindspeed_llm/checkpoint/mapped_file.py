"""A file mapped into memory, of which tensors are views."""

import math
import mmap
from pathlib import Path

import torch

from mindspeed.config import ConfigError

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MappedFile:
    """The bytes of a file; pages are read when touched and can be let go at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.size = path.stat().st_size
            if self.size == 0:
                raise ConfigError(f"{path}: is empty")
            # A private copy-on-write mapping: torch wants memory it could write to.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a view of the numbers that begin at a byte, which may be any: see `aligned`."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=start)
        return flat.view(shape)

    def read(self, start: int, stop: int) -> bytes:
        """Return a range of bytes."""
        return self._map[start:stop]

    def let_go(self) -> None:
        """Give the pages back; they are read again if touched again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def aligned(values: torch.Tensor) -> torch.Tensor:
    """Return numbers one can compute with: a copy, if they begin at an odd address."""
    if values.data_ptr() % values.itemsize == 0:
        return values
    raw = values.view(_INTEGERS[values.itemsize]).numpy()  # NumPy, unlike torch, minds addresses
    return torch.from_numpy(raw.copy()).view(values.dtype)
