"""Metrics of a train step: reduced over all ranks by one all-reduce, read from the device once."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from mindspeed import device

Reduction = Literal["mean", "micro_batch_mean", "sum", "max", "min"]
StopCheck = Callable[[], bool]
"""Returns whether this rank was asked to stop; a step asks when it adds up its results."""


@dataclass(frozen=True)
class StepResult:
    """What a train step did, the same on every rank."""

    metrics: dict[str, float]
    """Values of the step by name, the loss or the reward first."""
    grad_norm: float
    tokens: int
    """Tokens of the step, without padding."""
    loss_scale: float
    is_updated: bool
    is_finite: bool
    should_stop: bool
    """Whether any rank was asked to stop."""
    done: Any = None
    """The event at which the device had the result; None where the host had it first."""


class PendingStep:
    """A train step that is queued on the device, which knows its result later."""

    def __init__(self, read: Callable[[], StepResult]) -> None:
        self._read: Callable[[], StepResult] | None = read
        self._result: StepResult | None = None
        self._listener: Callable[[StepResult], None] | None = None

    @classmethod
    def finished(cls, result: StepResult) -> "PendingStep":
        """Return a step whose result is known."""
        step = cls(lambda: result)
        step.wait()
        return step

    @property
    def is_read(self) -> bool:
        """Whether the result is known to the host."""
        return self._result is not None

    def when_read(self, listener: Callable[[StepResult], None]) -> None:
        """Call a listener with the result as soon as that is read; now, if it is."""
        if self._result is not None:
            listener(self._result)
        else:
            self._listener = listener

    def wait(self) -> StepResult:
        """Return the result; the first call waits for the device."""
        if self._result is None:
            assert self._read is not None
            self._result, listener = self._read(), self._listener
            self._read = self._listener = None  # and what they hold
            if listener is not None:
                listener(self._result)
        return self._result


@dataclass(frozen=True)
class Metric:
    """A number that a stage reports for every micro-batch, and how a step reduces it.

    A report is a scalar, or the pair (sum, count). The mean is that over all that is counted, and
    is left out where nothing is; micro_batch_mean is the mean over micro-batches of the mean of
    each.
    """

    name: str
    reduction: Reduction = "mean"
    over: str = ""
    """What the mean is over, where a user may expect something else: the log says so."""
    difference: tuple[str, str] | None = None
    """Two other metrics: this one is the first less the second, and is not in reports. A step that
    lacks one of the two does not have it."""


@dataclass(frozen=True)
class ReducedMetrics:
    """What every rank knows after a step."""

    metrics: dict[str, float]
    tokens: int
    extras: list[float]
    """Sums over all ranks of whatever else was reduced."""
    is_finite: bool


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks, on the device: of each metric and its count, of tokens, of extras."""

    names: Sequence[str]
    """Metrics that are sums over counts."""
    values: torch.Tensor
    sums: frozenset[str] = frozenset()
    """Those of the names that are not divided by their count."""
    bounds: Mapping[str, torch.Tensor] | None = None
    """Largest and smallest values by name."""
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Metrics that are the difference of two others."""

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens of the step."""
        return self.values[2 * len(self.names)]

    def extra(self, number: int) -> torch.Tensor:
        """Return the sum of one of the extras."""
        return self.values[2 * len(self.names) + 1 + number]

    def is_finite(self) -> torch.Tensor:
        """Return, on the device, whether all sums are finite."""
        return self.values.isfinite().all()

    def read(self, *more: torch.Tensor) -> tuple[ReducedMetrics, list[float]]:
        """Wait for the device, once; `more` are scalars that are read with the totals."""
        return self.start_read(*more).wait()

    def start_read(self, *more: torch.Tensor) -> "TotalsRead":
        """Queue the copy to the host; what is queued after it need not be done when it is read."""
        bounds = list((self.bounds or {}).values())
        parts = [t.to(self.values.device, torch.float64).reshape(-1) for t in (*bounds, *more)]
        row, here = torch.cat([self.values.double(), *parts]), device.current()
        copy = here.host_buffer(row.nbytes).view(row.dtype)
        copy.copy_(row, non_blocking=True)
        done = here.event(timing=True)
        done.record(here.current_stream())
        return TotalsRead(self, copy, done)


@dataclass(frozen=True)
class TotalsRead:
    """A copy of totals on its way to the host."""

    totals: StepTotals
    copy: torch.Tensor
    done: Any
    """The event that the copy is complete."""

    def wait(self) -> tuple[ReducedMetrics, list[float]]:
        """Wait for the copy; return the metrics, and the scalars that were read with them."""
        self.done.synchronize()
        numbers, totals = self.copy.tolist(), self.totals
        names, bounds = totals.names, totals.bounds or {}
        count, end = totals.values.numel(), 2 * len(names)
        metrics = {
            name: value if name in totals.sums else value / max(divisor, 1.0)
            for name, value, divisor in zip(names, numbers[0:end:2], numbers[1:end:2])
            if divisor != 0 or name in totals.sums
        }
        metrics |= dict(zip(bounds, numbers[count : count + len(bounds)]))
        for name, (one, other) in totals.differences.items():
            if one in metrics and other in metrics:
                metrics[name] = metrics[one] - metrics[other]
        is_finite = all(map(math.isfinite, numbers[:count]))
        tokens, extras = int(numbers[end]), numbers[end + 1 : count]
        reduced = ReducedMetrics(metrics, tokens, extras, is_finite)
        return reduced, numbers[count + len(bounds) :]


def reduce_metrics(
    metrics: Sequence[Metric],
    reports: Sequence[Mapping[str, torch.Tensor]],
    *,
    tokens: int,
    extras: Sequence[torch.Tensor | float] = (),
) -> StepTotals:
    """Add up on the device what the micro-batches of all ranks report; nothing waits for it.

    A rank that computes no loss has no reports. `extras` are added up over all ranks with them.
    """
    differences = {metric.name: metric.difference for metric in metrics if metric.difference}
    reported = [metric for metric in metrics if metric.name not in differences]
    summed = [metric for metric in reported if metric.reduction not in ("max", "min")]
    pairs = [_sum_and_count(metric, reports) for metric in summed]
    counts = [n for _, count in pairs for n in (0.0, count)]
    host = [value if isinstance(value, float) else 0.0 for value in extras]
    row = torch.tensor([*counts, float(tokens), *host])
    row = row.to(device.current().torch_device, non_blocking=True)
    for number, (total, _) in enumerate(pairs):
        if total is not None:
            row[2 * number : 2 * number + total.numel()] = total
    first_extra = 2 * len(summed) + 1
    for number, value in enumerate(extras):
        if isinstance(value, torch.Tensor):
            row[first_extra + number] = value
    torch.distributed.all_reduce(row)
    names = [metric.name for metric in summed]
    sums = frozenset(metric.name for metric in summed if metric.reduction == "sum")
    bounded = [metric for metric in reported if metric.reduction in ("max", "min")]
    bounds = _bounds(bounded, reports) if bounded else None
    return StepTotals(names, row, sums, bounds, differences)


class MeanMetrics:
    """The mean of each metric over the steps that have it."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    def add(self, metrics: Mapping[str, float]) -> None:
        """Count the metrics of a step."""
        self._counts.update(metrics.keys())
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def values(self) -> dict[str, float]:
        """Return the means, by name."""
        return {name: total / self._counts[name] for name, total in self._sums.items()}


def _sum_and_count(
    metric: Metric, reports: Sequence[Mapping[str, torch.Tensor]]
) -> tuple[torch.Tensor | None, float]:
    """Return a sum over micro-batches, with its count if the device knows it, else the count."""
    if not reports:
        return None, 0.0
    values = torch.stack([report[metric.name].float() for report in reports])
    if values.dim() == 1:
        return values.sum(), float(len(reports))
    if metric.reduction != "micro_batch_mean":
        return values.sum(0), 0.0
    return (values[:, 0] / values[:, 1].clamp(min=1.0)).sum(), float(len(reports))


def _bounds(
    metrics: Sequence[Metric], reports: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return the largest or smallest report of all ranks; one all-reduce of signed values."""
    signs = [1.0 if metric.reduction == "max" else -1.0 for metric in metrics]
    row = torch.full((len(metrics),), -math.inf, device=device.current().torch_device)
    for number, metric in enumerate(metrics if reports else ()):
        values = torch.stack([report[metric.name].float() for report in reports])
        row[number] = (signs[number] * values).max()
    torch.distributed.all_reduce(row, torch.distributed.ReduceOp.MAX)
    return {metric.name: sign * row[n] for n, (metric, sign) in enumerate(zip(metrics, signs))}
