"""Boxes: one (start, stop) pair per dimension of a tensor."""

import math

from mindspeed_llm.models.rules import Box, whole

__all__ = ["Box", "intersection", "moved", "sizes", "slices", "volume", "whole"]


def sizes(box: Box) -> tuple[int, ...]:
    """Return the length of each side."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Return the number of elements."""
    return math.prod(sizes(box))


def intersection(left: Box, right: Box) -> Box | None:
    """Return what two boxes share, if anything."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right))
    return shared if all(start < stop for start, stop in shared) else None


def moved(box: Box, source: Box, target: Box) -> Box:
    """Move a box that lies in `source` to where it lies in `target`, a box of the same size."""
    return tuple(
        (start - a + c, stop - a + c) for (start, stop), (a, _), (c, _) in zip(box, source, target)
    )


def slices(box: Box) -> tuple[slice, ...]:
    """Return the index that takes a box out of a tensor."""
    return tuple(slice(start, stop) for start, stop in box)
