"""Items that a thread prepares."""

import threading
import time
from itertools import count, islice

import pytest

from mindspeed_llm.data.prefetch import Prefetcher


def test_order_and_end():
    items = Prefetcher(iter(range(100)), ahead=3)
    assert list(items) == list(range(100))
    with pytest.raises(StopIteration):
        next(items)


def test_a_few_are_made_ahead_and_no_more():
    made = []
    items = Prefetcher((made.append(number) or number for number in count()), ahead=3)
    assert list(islice(items, 2)) == [0, 1]
    deadline = time.monotonic() + 10
    while len(made) < 6 and time.monotonic() < deadline:  # 2 taken, 3 wait, 1 waits for a place
        time.sleep(0.001)
    time.sleep(0.05)
    assert made == list(range(6))
    items.close()


def test_what_the_thread_raises_comes_in_its_turn_and_stays():
    def items():
        yield 1
        raise ValueError("record 2 is broken")

    prefetched = Prefetcher(items())
    assert next(prefetched) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="record 2 is broken"):
            next(prefetched)


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_closed_one_leaves_no_thread(taken):
    before = threading.active_count()
    items = Prefetcher(count(), ahead=2)
    assert list(islice(items, taken)) == list(range(taken))
    items.close()
    assert threading.active_count() == before


def test_the_thread_is_prepared_first():
    seen = []
    items = Prefetcher(iter([1]), begin=lambda: seen.append(threading.current_thread()))
    assert next(items) == 1 and seen != [threading.current_thread()]
