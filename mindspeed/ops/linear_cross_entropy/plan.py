"""Where the logits of each slice of the vocabulary wait for backward.

The first slices lie at the end of the memory that will be the weight's gradient: backward fills it
from the first row on, slice by slice, and has read each of them before it arrives there. The next
slices lie in a buffer, and what fits into neither is computed again, in the buffer's first place.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ALIGNMENT = 256  # columns: whole tiles of cuBLAS


@dataclass(frozen=True)
class Plan:
    """Slices of the vocabulary, all of one width but the last, and where they wait."""

    slices: tuple[slice, ...]
    tokens: int
    in_gradient: int
    in_buffer: int

    @property
    def buffer_size(self) -> int:
        """Count the logits of the buffer."""
        end = self.slices[self.in_gradient + self.in_buffer - 1].stop
        return self.tokens * (end - self.slices[self.in_gradient].start)

    @property
    def kept(self) -> int:
        """Count the slices that backward need not compute again."""
        return self.in_gradient + self.in_buffer

    def place(self, index: int, buffer: Tensor, gradient: Tensor | None) -> Tensor:
        """Return the memory of one slice, (tokens, columns)."""
        part = self.slices[index]
        slot = self.tokens * self.slices[0].stop
        memory, start = buffer, 0
        if index < self.in_gradient and gradient is not None:
            memory = gradient.view(-1)
            start = memory.numel() - (self.in_gradient - index) * slot
        elif index < self.kept:
            start = (index - self.in_gradient) * slot
        width = part.stop - part.start
        return memory[start : start + self.tokens * width].view(self.tokens, width)


def make_plan(
    tokens: int, vocabulary: int, hidden: int, *, capacity: int, width: int, has_gradient: bool
) -> Plan:
    """Cut the vocabulary, in slices of at most `width` unless all fits into the buffer.

    Args:
        capacity: columns of logits that the buffer may hold.
        has_gradient: the gradient of the weight (vocabulary, hidden) is there to wait in.
    """
    if capacity >= vocabulary:
        return Plan((slice(0, vocabulary),), tokens, 0, 1)
    width = min(width, max(capacity // ALIGNMENT, 1) * ALIGNMENT, vocabulary)
    starts = range(0, vocabulary, width)
    slices = tuple(slice(start, min(start + width, vocabulary)) for start in starts)
    in_gradient = _fit(tokens, vocabulary, hidden, width) if has_gradient else 0
    in_gradient = min(in_gradient, len(slices) - 1)
    in_buffer = min(len(slices) - in_gradient, max(capacity // width, 1))
    return Plan(slices, tokens, in_gradient, in_buffer)


def _fit(tokens: int, vocabulary: int, hidden: int, width: int) -> int:
    """Count the slices whose logits may wait at the end of the gradient.

    With c of them the logits of slice i start at vocabulary * hidden - (c - i) * tokens * width,
    and the gradient of this slice, written while they are read, ends at (i + 1) * width * hidden.
    Both grow evenly with i: if the first and the last slice have room, all have.
    """
    first = (vocabulary - width) * hidden // max(tokens * width, 1)
    last = (vocabulary * hidden - tokens * width) // max(width * hidden, 1)
    return max(0, min(first, last))
