"""What a run tells: Megatron's line on rank 0, the same numbers as JSON lines and TensorBoard."""

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed.config import parse_json
from mindspeed.tune.flop_meter import HARDWARE, MODEL, FlopMeter
from mindspeed_llm.training.step import StepResult

logger = logging.getLogger(__name__)


@dataclass
class Interval:
    """What happened since the last line."""

    began: float
    steps: int = 0
    tokens: int = 0
    finite: int = 0
    loss_sums: dict[str, float] | None = None


class TrainingLog:
    """Collects steps and writes; on other ranks than the first it does nothing."""

    def __init__(
        self,
        *,
        every: int,
        total: int,
        batch: int,
        is_writer: bool,
        file: Path | None = None,
        tensorboard: str | None = None,
        flops_per_step: float | None = None,
        meter: FlopMeter | None = None,
        world: int = 1,
    ) -> None:
        self._every, self._total, self._batch = every, total, batch
        self._is_writer, self._world, self._flops = is_writer, world, flops_per_step
        self._meter = meter
        self._file = file if is_writer else None
        self.board = _board(tensorboard) if tensorboard and is_writer else None
        self._interval = Interval(time.perf_counter())
        self.skipped = 0
        self.nan = 0

    def begin(self, iteration: int) -> None:
        """Start after an iteration; what an earlier run wrote beyond it is dropped."""
        self._interval = Interval(time.perf_counter())
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if self._file.is_file():
            lines = self._file.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _iteration(line) <= iteration] if iteration else []
            aside = self._file.with_name(f".{self._file.name}.{os.getpid()}")
            aside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(aside, self._file)

    def add(self, iteration: int, consumed: int, rate: float, result: StepResult) -> None:
        """Count a step; write when a line is due."""
        interval = self._interval
        interval.steps += 1
        interval.tokens += result.tokens
        self.nan += not result.is_finite
        self.skipped += result.is_finite and not result.is_updated
        if result.is_finite:
            interval.finite += 1
            sums = interval.loss_sums or dict.fromkeys(result.losses, 0.0)
            interval.loss_sums = {k: sums[k] + v for k, v in result.losses.items()}
        if iteration % self._every == 0 or iteration == self._total:
            if self._is_writer:
                self._write(self._numbers(iteration, consumed, rate, result))
            self._interval = Interval(time.perf_counter())

    def leave_out(self, seconds: float) -> None:
        """Do not count time in which no step ran, such as that of a save."""
        self._interval.began += seconds

    def note(self, iteration: int, numbers: dict[str, float]) -> None:
        """Write numbers that belong to no interval, such as an evaluation's."""
        if self._is_writer:
            words = [f"{name}: {value:.6E}" for name, value in numbers.items()]
            logger.info(" | ".join([f"evaluation at iteration {iteration}", *words]))
            self._record({"iteration": iteration, **numbers})

    def _numbers(
        self, iteration: int, consumed: int, rate: float, result: StepResult
    ) -> dict[str, Any]:
        interval = self._interval
        seconds = time.perf_counter() - interval.began
        losses = interval.loss_sums or {}
        numbers: dict[str, Any] = {
            "iteration": iteration,
            "consumed samples": consumed,
            "elapsed time per iteration (ms)": 1000 * seconds / interval.steps,
        }
        if self._flops is not None:
            speed = self._flops * interval.steps / seconds / self._world / 1e12
            numbers["throughput per GPU (TFLOP/s/GPU)"] = speed
        if self._meter is not None:
            numbers |= self._meter.rates(seconds / interval.steps)
        numbers |= {"learning rate": rate, "global batch size": self._batch}
        numbers |= {name: total / interval.finite for name, total in losses.items()}
        numbers |= {
            "loss scale": result.loss_scale,
            "grad norm": result.grad_norm,
            "number of skipped iterations": self.skipped,
            "number of nan iterations": self.nan,
        }
        # A model of the user's own may tell of none.
        return numbers | ({"tokens/s": interval.tokens / seconds} if interval.tokens else {})

    def _write(self, numbers: dict[str, Any]) -> None:
        logger.info(format_line(numbers, self._total))
        self._record(numbers)

    def _record(self, numbers: dict[str, Any]) -> None:
        if self._file is not None:
            try:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(numbers) + "\n")
            except OSError as error:  # a full disk does not stop a run until it has to save
                logger.warning("%s: no line is written (%s)", self._file, error.strerror)
        if self.board is not None:
            for name, value in numbers.items():
                if name != "iteration":
                    self.board.add_scalar(name, value, numbers["iteration"])
            self.board.flush()


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
"""How the fields of a line are written; a loss is written as a rate is."""


def format_line(numbers: dict[str, Any], total: int) -> str:
    """Write the line whose fields scripts read by name and order."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    fields = [f" [{stamp}] iteration {numbers['iteration']:8d}/{total:8d}"]
    for name, value in numbers.items():
        if name != "iteration":
            fields.append(f"{name}: " + FORMATS.get(name, "{:.6E}").format(value))
    return " | ".join(fields) + " |"


def _iteration(line: str) -> float:
    try:
        return float(parse_json(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line that a killed run left unfinished


def _board(folder: str) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)
