"""The search for the longest sequence of the peer."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_memory


@pytest.mark.parametrize("limit", [50_000, 262_144, 700_000, 1_900_000])
def test_the_search_ends_close_to_the_limit(limit):
    fits, refused, length = 0, None, bench_memory.PEER_FIRST
    attempts = []
    while length is not None:
        attempts.append(length)
        if length <= limit:
            fits = length
        else:
            refused = length
        length = bench_memory._next_length(fits, refused)
    assert len(attempts) == len(set(attempts)) <= 8
    assert fits <= limit < refused
    assert refused - fits <= fits / 8 + 2 * bench_memory.PEER_STEP
