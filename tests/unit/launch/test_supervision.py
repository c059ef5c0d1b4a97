"""Which rank is blamed, and what is said about it."""

import time

import pytest

from mindspeed.launch import supervision
from mindspeed.launch.supervision import (
    describe_failure,
    describe_hang,
    describe_unresponsive,
    watch,
)


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_GRACE", 0.2)


class Scripted:
    """A rank whose end is written down beforehand."""

    suspended = False

    def __init__(self, rank: int, code: int | None, at: float = 0.0, words: str = "") -> None:
        self.rank = rank
        self.code = code
        self.at = at
        self.words = words

    def exit_code(self) -> int | None:
        return self.code

    def is_suspended(self) -> bool:
        return self.suspended

    def failed_at(self) -> float:
        return self.at

    def error_tail(self) -> str:
        return self.words

    def signal(self, number: int) -> None:
        self.code = -number


def test_all_well() -> None:
    verdict = watch([Scripted(0, 0), Scripted(1, 0)], time.sleep, None)
    assert verdict.failed is None and verdict.hung == ()


def test_the_earlier_failure_is_blamed() -> None:
    ranks = [Scripted(0, 1, 2.0), Scripted(1, 3, 1.0), Scripted(2, 0)]
    failed = watch(ranks, time.sleep, None).failed
    assert failed is ranks[1]


def test_a_rank_that_only_lost_its_peer_is_not_blamed() -> None:
    victim = Scripted(0, 1, 1.0, "RuntimeError: Connection closed by peer [127.0.0.1]:4")
    culprit = Scripted(1, 1, 1.1, "ValueError: boom")
    assert watch([victim, culprit], time.sleep, None).failed is culprit


def test_a_lone_victim_is_blamed_and_the_early_leaver_named() -> None:
    victim = Scripted(0, 1, 1.0, "RuntimeError: Connection closed by peer")
    ranks = [victim, Scripted(1, 0)]
    failed = watch(ranks, time.sleep, None).failed
    assert failed is victim
    assert describe_failure(victim, ranks) == (
        "rank 0 of 2 ended with exit code 1; rank 1 had already ended without an error"
    )


TIMED_OUT = "RuntimeError: [pair.cc] Timed out waiting 60000ms for recv operation to complete"


def test_only_a_suspended_rank_is_named_when_the_others_time_out() -> None:
    ranks = [Scripted(0, 1, 1.0, TIMED_OUT), Scripted(1, 1, 1.1, "Connection closed by peer")]
    ranks += [Scripted(2, None), Scripted(3, None)]
    ranks[2].suspended = True
    verdict = watch(ranks, time.sleep, None)
    assert verdict.failed is None and verdict.unresponsive == (ranks[2],)
    assert describe_unresponsive(verdict.unresponsive, ranks) == (
        "rank 2 of 4 did not answer within the time-out of the others and is suspended (SIGSTOP "
        "or a debugger)"
    )


def test_ranks_that_still_run_are_named_when_all_others_time_out() -> None:
    ranks = [Scripted(0, 1, 1.0, TIMED_OUT), Scripted(1, None), Scripted(2, None)]
    verdict = watch(ranks, time.sleep, None)
    assert describe_unresponsive(verdict.unresponsive, ranks) == (
        "ranks 1, 2 of 3 did not answer within the time-out of the others"
    )


def test_a_rank_that_fails_while_others_run_is_blamed() -> None:
    ranks = [Scripted(0, 1, 1.0, "ConnectionError: Connection refused by hub"), Scripted(1, None)]
    assert watch(ranks, time.sleep, None).failed is ranks[0]


def test_a_rank_that_fails_between_two_looks_is_blamed() -> None:
    rank = Scripted(0, 1)
    looks = iter([None])  # it runs when it is looked at first, and has failed right after
    rank.exit_code = lambda: next(looks, 1)  # type: ignore[method-assign]
    assert watch([rank], lambda seconds: None, None).failed is rank


def test_a_request_to_stop_is_no_failure() -> None:
    rank = Scripted(0, 143)
    assert describe_failure(rank, [rank]) == (
        "rank 0 of 1 stopped before its last step (exit code 143: SIGTERM)"
    )


def test_the_deadline_names_who_still_runs() -> None:
    ranks = [Scripted(0, 0), Scripted(1, None), Scripted(2, None)]
    verdict = watch(ranks, time.sleep, time.monotonic())
    assert [rank.rank for rank in verdict.hung] == [1, 2]
    expected = "time-out after 5 s with ranks 1, 2 of 3 still running"
    assert describe_hang(verdict.hung, ranks, 5) == expected


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "ended with exit code 3"), (-11, "was killed by SIGSEGV"), (-9, "out of memory?")],
)
def test_an_exit_is_put_into_words(code: int, words: str) -> None:
    rank = Scripted(0, code)
    assert words in describe_failure(rank, [rank])
