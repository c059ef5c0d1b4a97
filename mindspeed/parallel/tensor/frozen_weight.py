"""A weight without a gradient whose GEMMs low-rank factors take part in, in one operand with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor


class FrozenWeight:
    """W (out, in), and its concatenation with B (out, rank) or A (rank, in)."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @property
    def shape(self) -> torch.Size:
        """(out, in)."""
        return self.weight.shape

    def beside(self, outer: Tensor, *, again: bool = False) -> Tensor:
        """Return [W | B] in the dtype of B.

        `again` says that B is that of an earlier call, as in backward: it has not changed since.
        """
        return torch.cat((self.weight.to(outer.dtype), outer), 1)

    def above(self, inner: Tensor, *, again: bool = False) -> Tensor:
        """Return [W; A] in the dtype of A."""
        return torch.cat((self.weight.to(inner.dtype), inner))


class BufferedWeight(FrozenWeight):
    """A weight that is kept in a buffer with space for the factors, so that only they are copied.

    The buffer has columns beside a weight that is not narrower than its input, and rows below one
    that is not wider: what the GEMMs of `low_rank_linear` ask for. `weight.data` becomes a part of
    it. Whatever is left of the buffer between two calls is overwritten by the next.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__(weight)
        size_out, size_in = weight.shape
        columns = rank if size_out >= size_in else 0
        rows = rank if size_out <= size_in else 0
        self._rank = rank
        self._buffer = weight.data.new_empty(size_out + rows, size_in + columns)
        self._buffer[:size_out, :size_in] = weight.data
        weight.data = self._buffer[:size_out, :size_in]
        self._outer = _Written(self._buffer[:size_out, size_in:])
        self._inner = _Written(self._buffer[size_out:, :size_in])

    def holds(self, weight: Tensor, rank: int) -> bool:
        """Return whether a weight still is where it was put, with space for factors of a rank."""
        return (
            rank == self._rank
            and weight is self.weight
            and weight.dtype == self._buffer.dtype
            and weight.data_ptr() == self._buffer.data_ptr()
            and weight.stride() == self._buffer.stride()
        )

    def beside(self, outer: Tensor, *, again: bool = False) -> Tensor:
        """Return [W | B] in the dtype of B."""
        if not self._outer.takes(outer):
            return super().beside(outer)
        self._outer.write(outer, again)
        return self._buffer[: len(outer)]

    def above(self, inner: Tensor, *, again: bool = False) -> Tensor:
        """Return [W; A] in the dtype of A."""
        if not self._inner.takes(inner):
            return super().above(inner)
        self._inner.write(inner, again)
        return self._buffer[:, : inner.shape[1]]


class _Written:
    """A part of a buffer, and which tensor was written there last."""

    def __init__(self, part: Tensor) -> None:
        self._part = part
        self._last: Callable[[], Tensor | None] = lambda: None

    def takes(self, values: Tensor) -> bool:
        return values.shape == self._part.shape and values.dtype == self._part.dtype

    def write(self, values: Tensor, again: bool) -> None:
        if not (again and self._last() is values):
            self._part.copy_(values.detach())
            self._last = weakref.ref(values)
