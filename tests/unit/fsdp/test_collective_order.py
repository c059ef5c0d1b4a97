"""The schedule of collectives: a supersequence of the orders of all ranks."""

from hypothesis import given
from hypothesis import strategies as st

from mindspeed.fsdp.collective_order import MAX_IDLE_PASSES, PassKind, PassState, Schedule

slots = st.lists(st.integers(0, 5), max_size=8)


def is_subsequence(part: list[int], whole: list[int]) -> bool:
    rest = iter(whole)
    return all(slot in rest for slot in part)


@given(slots, st.lists(slots, max_size=4))
def test_a_schedule_is_a_supersequence_of_all_ranks(first, others):
    schedule = Schedule()
    schedule.merge([first])
    schedule.merge(others)
    assert all(is_subsequence(part, schedule.slots) for part in [first, *others])
    assert len(schedule.idle) == len(schedule.slots)


def test_warmup_passes_are_not_merged():
    schedule = Schedule(warmup=1)
    schedule.merge([[3, 2, 1]])
    assert not schedule.is_ready
    schedule.merge([[1, 2, 3]])
    assert schedule.is_ready and schedule.slots == [1, 2, 3]


def test_slots_that_no_rank_uses_are_dropped():
    schedule = Schedule()
    schedule.merge([[4, 5, 4]])
    for _ in range(MAX_IDLE_PASSES):
        schedule.age([1, 0, 1])
    assert schedule.slots == [4, 5, 4]
    schedule.age([1, 1, 0])
    for _ in range(MAX_IDLE_PASSES):
        schedule.age([1, 1, 0])
    assert schedule.slots == [4, 5]


def test_a_pass_marks_the_slots_that_it_used():
    schedule = Schedule()
    schedule.merge([[4, 5, 6]])
    state = PassState(schedule, PassKind.FORWARD)
    assert state.is_upcoming(6)
    assert state.skip() == 4
    state.issue()
    assert (state.issued, state.used, state.is_upcoming(4)) == ([5], [0, 1, 0], False)
