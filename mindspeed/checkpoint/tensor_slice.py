"""Tensor slices: one (start, stop) pair per dimension of a tensor."""

import math
from collections.abc import Sequence

TensorSlice = tuple[tuple[int, int], ...]


def full_slice(shape: Sequence[int]) -> TensorSlice:
    """Return the slice that covers a tensor of this shape."""
    return tuple((0, size) for size in shape)


def slice_shape(region: TensorSlice) -> tuple[int, ...]:
    """Return the shape of a slice."""
    return tuple(stop - start for start, stop in region)


def slice_numel(region: TensorSlice) -> int:
    """Return the number of elements."""
    return math.prod(slice_shape(region))


def intersection(left: TensorSlice, right: TensorSlice) -> TensorSlice | None:
    """Return the overlap of two slices, None if they are disjoint."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right))
    return shared if all(start < stop for start, stop in shared) else None


def translate(region: TensorSlice, source: TensorSlice, target: TensorSlice) -> TensorSlice:
    """Shift a slice that lies within `source` to its position in `target`, of the same shape."""
    return tuple(
        (start - a + c, stop - a + c)
        for (start, stop), (a, _), (c, _) in zip(region, source, target)
    )


def to_index(region: TensorSlice) -> tuple[slice, ...]:
    """Return the index expression that selects a slice of a tensor."""
    return tuple(slice(start, stop) for start, stop in region)
