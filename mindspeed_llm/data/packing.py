"""Which samples share a row: greedy, the longest that still fits first."""

from collections.abc import Sequence

import numpy as np

from mindspeed_llm.data.indexed import Array


def plan_rows(lengths: Sequence[int] | Array, capacity: int) -> list[list[int]]:
    """Share out samples over rows of `capacity` tokens; every sample must fit a row.

    A row takes the longest sample left, then again the longest that fits in the rest. Finding it
    costs next to nothing: `nearest[n]` leads to the longest length up to n of which one is left.
    """
    sizes = np.asarray(lengths, np.int64)
    if sizes.size and not 0 < sizes.min() <= sizes.max() <= capacity:
        raise ValueError(f"samples must have 1 to {capacity} tokens")
    order = np.argsort(-sizes, kind="stable")
    counts = np.bincount(sizes, minlength=capacity + 1)
    # The samples of length n are order[starts[n] : starts[n] + counts[n]], in their old order.
    starts = len(sizes) - np.cumsum(counts)
    left, taken = counts.tolist(), starts.tolist()
    nearest = list(range(capacity + 1))

    def longest(room: int) -> int:
        """Return the longest length up to `room` that is left, 0 if there is none."""
        found = room
        while found and not (nearest[found] == found and left[found]):
            found = nearest[found] if nearest[found] != found else found - 1
        while room != found:  # lead the way there directly next time
            nearest[room], room = found, nearest[room] if nearest[room] != room else room - 1
        return found

    rows: list[list[int]] = []
    while size := longest(capacity):
        row, room = [], capacity
        while size:
            row.append(int(order[taken[size]]))
            taken[size] += 1
            left[size] -= 1
            room -= size
            size = longest(room)
        rows.append(row)
    return rows
