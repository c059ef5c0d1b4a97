"""A live line on a terminal: the step, the loss, the speed and the time that is left."""

import logging
import sys
import time
from typing import Any

from mindspeed_llm.training.step import StepResult

SMOOTHING = 0.8
"""Weight of the speed so far against that of the last step."""


class StepBar:
    """Shown on the first rank and if stderr is a terminal; otherwise it does nothing."""

    def __init__(self, total: int, *, is_writer: bool) -> None:
        self._total = total
        self._is_shown = is_writer and sys.stderr.isatty()
        self._bar: Any = None
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._speed: float | None = None
        self._last = 0.0

    def begin(self, iteration: int) -> None:
        """Show the bar of a run that goes on after an iteration."""
        if not self._is_shown:
            return
        from rich import progress
        from rich.console import Console

        columns = (
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(),
            progress.TextColumn("loss {task.fields[loss]}"),
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
        self._bar.add_task("", total=self._total, completed=iteration, loss="-", speed="-")
        self._last = time.perf_counter()

    def add(self, iteration: int, result: StepResult) -> None:
        """Count a step."""
        if self._bar is None:
            return
        now = time.perf_counter()
        speed = result.tokens / max(now - self._last, 1e-9)
        if self._speed is not None:
            speed = SMOOTHING * self._speed + (1 - SMOOTHING) * speed
        self._speed, self._last = speed, now
        loss = next(iter(result.losses.values()), float("nan"))
        self._bar.update(
            self._bar.task_ids[0], completed=iteration, loss=f"{loss:.4f}", speed=f"{speed:,.0f}"
        )

    def leave_out(self, seconds: float) -> None:
        """Do not count time in which no step ran, such as that of a save."""
        self._last += seconds

    def end(self) -> None:
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
