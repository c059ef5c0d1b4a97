"""The log of a run: Megatron's line on rank 0, JSON lines, TensorBoard, and a progress bar."""

import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed.training.json_lines import JsonLines
from mindspeed.training.metrics import MeanMetrics, StepResult
from mindspeed.training.trackers import WandbRun, open_board
from mindspeed.tune.flop_meter import HARDWARE, MODEL, FlopMeter

logger = logging.getLogger(__name__)

SMOOTHING = 0.8
"""Weight of the speed so far against that of the last step, in the progress bar."""


class StepClock:
    """Tells by the clock of the host when a device finished each step.

    The host may read the result of a step much later, so the time between two steps is that of
    their events on the device.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, float] | None = None

    def time_of(self, done: Any) -> float:
        """Return when an event that is over occurred, now for None; events come in order."""
        now = time.perf_counter()
        if done is None:
            return now
        if self._last is not None:
            event, time_of_event = self._last
            now = min(now, time_of_event + event.elapsed_time(done) / 1000)
        self._last = done, now
        return now


@dataclass
class Interval:
    """What happened since the last line."""

    start: float
    steps: int = 0
    tokens: int = 0
    metrics: MeanMetrics = field(default_factory=MeanMetrics)
    """Those of steps that are finite."""


class TrainingLog:
    """Collects steps and writes lines; on ranks other than the first it writes nothing."""

    def __init__(
        self,
        *,
        interval: int,
        total: int,
        global_batch: int,
        is_writer: bool,
        file: Path | None = None,
        tensorboard_dir: str | None = None,
        tracker: WandbRun | None = None,
        flops_per_token: float | None = None,
        meter: FlopMeter | None = None,
        world_size: int = 1,
    ) -> None:
        self._log_interval, self._total, self._global_batch = interval, total, global_batch
        self.is_writer, self._world_size, self._flops = is_writer, world_size, flops_per_token
        self._meter = meter
        self._file = JsonLines(file) if is_writer and file is not None else None
        self.board = open_board(tensorboard_dir) if tensorboard_dir and is_writer else None
        self._tracker = tracker
        self._interval = Interval(time.perf_counter())
        self.skipped = 0
        self.nan = 0

    def start(self, iteration: int) -> None:
        """Start after an iteration; lines that an earlier run wrote beyond it are dropped."""
        self._interval = Interval(time.perf_counter())
        if self._file is not None:
            self._file.start(iteration)

    def add(
        self, iteration: int, consumed: int, rate: float, result: StepResult, finished: float
    ) -> None:
        """Count a step that was finished at some time; write when a line is due."""
        interval = self._interval
        interval.steps += 1
        interval.tokens += result.tokens
        self.nan += not result.is_finite
        self.skipped += result.is_finite and not result.is_updated
        if result.is_finite:
            interval.metrics.add(result.metrics)
        if iteration % self._log_interval == 0 or iteration == self._total:
            if self.is_writer:
                self._write(self._numbers(iteration, consumed, rate, result, finished))
            self._interval = Interval(finished)

    def exclude(self, seconds: float) -> None:
        """Exclude time in which no step ran, such as that of a save."""
        self._interval.start += seconds

    def add_evaluation(self, iteration: int, metrics: dict[str, float]) -> None:
        """Write the metrics of an evaluation, which belong to no interval."""
        if self.is_writer:
            fields = [f"{name}: {value:.6E}" for name, value in metrics.items()]
            logger.info(" | ".join([f"evaluation at iteration {iteration}", *fields]))
            self._record({"iteration": iteration, **metrics})

    def add_report(
        self,
        iteration: int,
        title: str,
        numbers: dict[str, float],
        curves: dict[str, float],
        tables: dict[str, Any],
    ) -> None:
        """Write a line that is due by itself: numbers everywhere, tables to the JSON lines only.

        `curves` go to boards, which draw one for each name.
        """
        if not self.is_writer:
            return
        fields = [f"{name}: {value:.4g}" for name, value in numbers.items()]
        logger.info(" | ".join([f"{title} at iteration {iteration}", *fields]))
        self._append({"iteration": iteration, **numbers, **tables})
        self._send({"iteration": iteration, **numbers, **curves})

    def _numbers(
        self, iteration: int, consumed: int, rate: float, result: StepResult, finished: float
    ) -> dict[str, Any]:
        interval = self._interval
        seconds = finished - interval.start
        numbers: dict[str, Any] = {
            "iteration": iteration,
            "consumed samples": consumed,
            "elapsed time per iteration (ms)": 1000 * seconds / interval.steps,
        }
        if self._flops is not None:
            speed = self._flops * interval.tokens / seconds / self._world_size / 1e12
            numbers["throughput per GPU (TFLOP/s/GPU)"] = speed
        if self._meter is not None:
            numbers |= self._meter.rates(seconds / interval.steps)
        numbers |= {"learning rate": rate, "global batch size": self._global_batch}
        numbers |= interval.metrics.values()
        numbers |= {
            "loss scale": result.loss_scale,
            "grad norm": result.grad_norm,
            "number of skipped iterations": self.skipped,
            "number of nan iterations": self.nan,
        }
        # A model of the user's own may report no tokens.
        return numbers | ({"tokens/s": interval.tokens / seconds} if interval.tokens else {})

    def _write(self, numbers: dict[str, Any]) -> None:
        logger.info(format_line(numbers, self._total))
        self._record(numbers)

    def _record(self, numbers: dict[str, Any]) -> None:
        self._append(numbers)
        self._send(numbers)

    def _append(self, numbers: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.append(numbers)

    def _send(self, numbers: dict[str, Any]) -> None:
        if self.board is not None:
            for name, value in numbers.items():
                if name != "iteration":
                    self.board.add_scalar(name, value, numbers["iteration"])
            self.board.flush()
        if self._tracker is not None:
            self._tracker.log(numbers)

    def finish(self) -> None:
        """Send what trackers have not sent."""
        if self._tracker is not None:
            self._tracker.finish()


FORMATS = {
    "consumed samples": "{:12d}",
    "elapsed time per iteration (ms)": "{:.1f}",
    "throughput per GPU (TFLOP/s/GPU)": "{:.1f}",
    MODEL: "{:.4g}",
    HARDWARE: "{:.4g}",
    "learning rate": "{:.6E}",
    "global batch size": "{:5d}",
    "loss scale": "{:.1f}",
    "grad norm": "{:.3f}",
    "number of skipped iterations": "{:3d}",
    "number of nan iterations": "{:3d}",
    "tokens/s": "{:.1f}",
}
"""Formats of the fields of a line; metrics of a stage are written as the learning rate is."""


def format_line(numbers: dict[str, Any], total: int) -> str:
    """Return the line whose fields scripts read by name and order."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    fields = [f" [{stamp}] iteration {numbers['iteration']:8d}/{total:8d}"]
    for name, value in numbers.items():
        if name != "iteration":
            fields.append(f"{name}: " + FORMATS.get(name, "{:.6E}").format(value))
    return " | ".join(fields) + " |"


class ProgressBar:
    """Step, first metric, speed and remaining time on the first rank's terminal.

    Without a terminal on stderr, and on other ranks, it does nothing.
    """

    def __init__(self, total: int, *, is_writer: bool) -> None:
        self._total = total
        self._is_shown = is_writer and sys.stderr.isatty()
        self._bar: Any = None
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._speed: float | None = None
        self._last = 0.0

    def start(self, iteration: int) -> None:
        """Show the bar of a run that continues after an iteration."""
        if not self._is_shown:
            return
        from rich import progress
        from rich.console import Console

        columns = (
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[metric]}"),
            progress.TextColumn("{task.fields[speed]} tokens/s"),
            progress.TimeRemainingColumn(),
        )
        # Lines on the same terminal go above the bar; those in a file stay there.
        self._bar = progress.Progress(
            *columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty()
        )
        before = sys.stdout
        self._bar.start()
        self._redirect(before, sys.stdout)
        self._bar.add_task("", total=self._total, completed=iteration, metric="-", speed="-")
        self._last = time.perf_counter()

    def add(self, iteration: int, result: StepResult, finished: float) -> None:
        """Count a step."""
        if self._bar is None:
            return
        speed = result.tokens / max(finished - self._last, 1e-9)
        if self._speed is not None:
            speed = SMOOTHING * self._speed + (1 - SMOOTHING) * speed
        self._speed, self._last = speed, finished
        name, value = next(iter(result.metrics.items()), ("loss", float("nan")))
        metric, rate = f"{name} {value:.4f}", f"{speed:,.0f}"
        self._bar.update(self._bar.task_ids[0], completed=iteration, metric=metric, speed=rate)

    def exclude(self, seconds: float) -> None:
        """Exclude time in which no step ran, such as that of a save."""
        self._last += seconds

    def stop(self) -> None:
        """Leave the last state on the terminal."""
        if self._bar is not None:
            self._bar.stop()
            for handler, stream in self._moved:
                handler.setStream(stream)
            self._bar = None

    def _redirect(self, before: Any, after: Any) -> None:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                self._moved.append((handler, before))
                handler.setStream(after)
