"""What ranks learn from a pass: one order that holds the orders of all of them."""

from hypothesis import given
from hypothesis import strategies as st

from mindspeed.fsdp.schedule import KEPT_IDLE, Pass, Schedule

slots = st.lists(st.integers(0, 5), max_size=8)


def holds(whole: list[int], part: list[int]) -> bool:
    rest = iter(whole)
    return all(slot in rest for slot in part)


@given(slots, st.lists(slots, max_size=4))
def test_a_schedule_holds_every_sequence_in_its_order(first, others):
    schedule = Schedule()
    schedule.merge([first])
    schedule.merge(others)
    assert all(holds(schedule.slots, part) for part in [first, *others])
    assert len(schedule.idle) == len(schedule.slots)


def test_a_first_pass_that_is_no_example_is_not_learned():
    schedule = Schedule(unlike=1)
    schedule.merge([[3, 2, 1]])
    assert not schedule.is_known
    schedule.merge([[1, 2, 3]])
    assert schedule.is_known and schedule.slots == [1, 2, 3]


def test_what_no_rank_uses_for_long_is_dropped():
    schedule = Schedule()
    schedule.merge([[4, 5, 4]])
    for _ in range(KEPT_IDLE):
        schedule.age([1, 0, 1])
    assert schedule.slots == [4, 5, 4]
    schedule.age([1, 1, 0])
    for _ in range(KEPT_IDLE):
        schedule.age([1, 1, 0])
    assert schedule.slots == [4, 5]


def test_a_pass_marks_the_places_that_it_used():
    schedule = Schedule()
    schedule.merge([[4, 5, 6]])
    now = Pass(schedule, is_backward=False, is_special=True)
    assert now.is_ahead(6)
    assert now.pop() == 4
    now.take()
    assert (now.taken, now.used, now.is_ahead(4)) == ([5], [0, 1, 0], False)
