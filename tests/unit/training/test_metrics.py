"""Metrics of a step: every reduction over micro-batches and ranks, and what is not finite."""

import gc
import math
import weakref
from typing import Any

import pytest
import torch

from mindspeed.training.metrics import (
    MeanMetrics,
    Metric,
    PendingStep,
    StepResult,
    reduce_metrics,
)
from tests.ranks import run_ranks

KINDS = [
    Metric("per token", "mean"),
    Metric("per micro-batch", "micro_batch_mean"),
    Metric("scalar", "mean"),
    Metric("total", "sum"),
    Metric("largest", "max"),
    Metric("smallest", "min"),
]


def _report(total: float, count: float) -> dict[str, torch.Tensor]:
    pair = torch.tensor([total, count])
    return {metric.name: pair if "per" in metric.name else pair[0] for metric in KINDS}


def _reduce(bad: bool) -> tuple[dict[str, float], int, list[float], bool, bool]:
    """Reduce three micro-batches of the first rank; the others compute no loss."""
    is_first = torch.distributed.get_rank() == 0
    reports = [_report(6.0, 3.0), _report(8.0, 1.0), _report(0.0, 0.0)] if is_first else []
    overflow: Any = torch.tensor(math.inf if bad and not is_first else 1.0) * 0.0
    totals = reduce_metrics(KINDS, reports, tokens=5 * is_first, extras=(overflow, 1.0))
    reduced, (norm,) = totals.read(torch.tensor(2.5))
    assert norm == 2.5
    is_finite = bool(totals.is_finite())
    return reduced.metrics, reduced.tokens, reduced.extras, reduced.is_finite, is_finite


def test_reductions_over_two_ranks() -> None:
    expected = {"per token": 14 / 4, "per micro-batch": 10 / 3, "scalar": 14 / 3, "total": 14.0}
    for metrics, tokens, extras, *is_finite in run_ranks(_reduce, 2, False):
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
        assert (metrics["largest"], metrics["smallest"]) == (8.0, 0.0)
        assert tokens == 5 and extras == [0.0, 2.0] and is_finite == [True, True]


def test_an_overflow_of_one_rank_is_known_to_all() -> None:
    for *_, on_host, on_device in run_ranks(_reduce, 2, True):
        assert not on_host and not on_device


def _read_behind_an_update() -> tuple[dict[str, float], list[float]]:
    totals = reduce_metrics([Metric("loss")], [{"loss": torch.tensor([6.0, 3.0])}], tokens=3)
    scale = torch.tensor(4.0)
    read = totals.start_read(scale)
    totals.values.fill_(math.nan)
    scale.zero_()
    reduced, more = read.wait()
    return reduced.metrics, more


def test_a_read_has_the_values_of_when_it_was_queued() -> None:
    assert run_ranks(_read_behind_an_update, 1) == [({"loss": 2.0}, [4.0])]


RESULT = StepResult({"loss": 1.0}, 1.0, 1, 1.0, True, True, False)


def test_a_result_is_read_once_and_its_reader_forgotten() -> None:
    class Reader:
        calls = 0

        def __call__(self) -> StepResult:
            self.calls += 1
            return RESULT

    reader, heard = Reader(), list[StepResult]()
    kept, step = weakref.ref(reader), PendingStep(reader)
    step.when_read(heard.append)
    assert not step.is_read and not heard
    assert step.wait() is step.wait() is RESULT and heard == [RESULT] and reader.calls == 1
    gc.disable()
    try:
        del reader
        assert kept() is None and step.is_read
    finally:
        gc.enable()


def test_a_result_that_is_known_is_heard_at_once() -> None:
    heard: list[StepResult] = []
    PendingStep.finished(RESULT).when_read(heard.append)
    assert heard == [RESULT]


SIDES = [
    Metric("chosen"),
    Metric("rejected"),
    Metric("margin", difference=("chosen", "rejected")),
]


def _reduce_sides(counts: list[tuple[float, float]]) -> dict[str, float]:
    """Reduce one micro-batch a rank; each chosen one counts 3, each rejected one 1."""
    chosen, rejected = counts[torch.distributed.get_rank()]
    report = {
        "chosen": torch.tensor([3 * chosen, chosen]),
        "rejected": torch.tensor([1 * rejected, rejected]),
    }
    return reduce_metrics(SIDES, [report], tokens=1).read()[0].metrics


def test_a_difference_is_that_of_the_means_over_all_ranks() -> None:
    """No rank has both kinds; the step has."""
    expected = {"chosen": 3.0, "rejected": 1.0, "margin": 2.0}
    assert run_ranks(_reduce_sides, 2, [(4, 0), (0, 1)]) == [expected] * 2


def test_a_mean_over_nothing_is_left_out_and_so_is_its_difference() -> None:
    assert run_ranks(_reduce_sides, 2, [(4, 0), (1, 0)]) == [{"chosen": 3.0}] * 2


def test_means_of_several_steps_are_over_those_that_have_the_metric() -> None:
    means = MeanMetrics()
    for step in ({"loss": 1.0}, {"loss": 3.0, "margin": 5.0}, {"loss": 5.0}):
        means.add(step)
    assert means.values() == {"loss": 3.0, "margin": 5.0}
