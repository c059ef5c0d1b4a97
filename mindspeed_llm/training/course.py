"""The course of any run: step after step, with lines, evaluations and checkpoints on the way."""

import gc
import logging
import signal
import time
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import yaml

from mindspeed import device
from mindspeed.checkpoint.commit import atomic_write_text
from mindspeed.config import ConfigError
from mindspeed.training.entry import RunFailed, Stopped, StopRequest
from mindspeed.training.log import ProgressBar, TrainingLog
from mindspeed.training.metrics import StepResult
from mindspeed.training.options import RunOptions
from mindspeed.training.schedule import make_schedule
from mindspeed.tune.flop_meter import FlopMeter
from mindspeed_llm.training.folders import Progress, newest_good

logger = logging.getLogger(__name__)


class NotANumber(RunFailed):
    """Training cannot go on: losses or gradients are not numbers."""


class Saving(Protocol):
    """What a run needs of its checkpoints."""

    def save(
        self, progress: Progress, *, keep_last: int | None = None, in_background: bool = False
    ) -> None:
        """Save where the run is, if there is a place for it."""

    def poll(self) -> None:
        """Complete a save in the background if all ranks have written."""

    def finish(self) -> None:
        """Wait for a save in the background and complete it."""


class Course(ABC):
    """Runs to the last step, or until asked to stop; a subclass says what a step is."""

    def __init__(
        self,
        options: RunOptions,
        checkpoints: Saving,
        optimizer: Any,
        progress: Progress,
        *,
        steps: int,
        batch: int,
        rank: int,
        world: int,
        flops: float | None = None,
        meter: FlopMeter | None = None,
    ) -> None:
        self._options, self._checkpoints, self._optimizer = options, checkpoints, optimizer
        self._begun, self._batch, self._meter = progress, batch, meter
        self.steps, self.rank = steps, rank
        self._schedule = make_schedule(options, steps)
        file = options.log_file or (f"{options.save}/log.jsonl" if options.save else None)
        self._log = TrainingLog(
            interval=options.log_interval,
            total=steps,
            global_batch=batch,
            is_writer=rank == 0,
            file=Path(file) if file else None,
            tensorboard_dir=options.tensorboard_dir,
            flops_per_step=flops,
            meter=meter,
            world_size=world,
        )
        self._bar = ProgressBar(steps, is_writer=rank == 0)

    @abstractmethod
    def learn(self, progress: Progress, stop: bool) -> StepResult:
        """Take the step after `progress`; `stop` is this rank's wish to end."""

    @abstractmethod
    def evaluate(self) -> dict[str, float] | None:
        """Return the mean losses on the validation data, if there is any."""

    @abstractmethod
    def note(self, iteration: int, consumed: int) -> Progress:
        """Return what a checkpoint after this iteration tells."""

    def config(self) -> dict[str, Any]:
        """Return what was run, to be kept with the checkpoints."""
        return self._options.model_dump(mode="json") | {"train_iters": self.steps, "epochs": None}

    def save(self, progress: Progress) -> None:
        """Save where the run is."""
        self._checkpoints.save(
            progress, keep_last=self._options.keep_last, in_background=self._options.async_save
        )

    def run(self) -> Progress:
        """Train to the last step and return where the run is.

        Raises Stopped, once the checkpoint is written, if the run is asked to end before that.
        """
        progress = self._begun
        if progress.iteration >= self.steps:
            logger.info("all %d iterations are done: more by --train-iters or --epochs", self.steps)
        self._write_config()
        self._log.start(progress.iteration)
        self._bar.start(progress.iteration)
        gc.freeze()  # collections, which every save asks for, need not visit all that is there now
        try:
            with StopRequest() as request:
                progress = self._steps(progress, request)
                self._checkpoints.finish()
                if progress.iteration < self.steps:
                    raise self._stopped(progress, request.signal or signal.SIGTERM)
        finally:
            gc.unfreeze()
            self._bar.stop()
        if self.rank == 0:
            peak = device.current().max_memory_allocated() / 2**30
            logger.info("peak memory of rank 0: %.2f GiB", peak)
        return progress

    def _steps(self, progress: Progress, request: StopRequest) -> Progress:
        bad = progress.nan_streak
        while progress.iteration < self.steps:
            progress, result = self._step(progress, request.is_set)
            began = time.perf_counter()
            self._checkpoints.poll()
            bad = 0 if result.is_finite else bad + 1
            if bad >= self._options.max_nan_iterations:
                self._checkpoints.finish()
                raise NotANumber(self._explain_nan(progress.iteration, bad))
            progress = replace(progress, nan_streak=bad)
            self._save_if_due(progress, is_last=result.should_stop)
            self._evaluate_if_due(progress)
            for shown in (self._log, self._bar):
                shown.exclude(time.perf_counter() - began)
            if result.should_stop:
                break
        return progress

    def _step(self, progress: Progress, stop: bool) -> tuple[Progress, StepResult]:
        iteration = progress.iteration + 1
        rate = self._schedule.apply(self._optimizer, progress.iteration)
        with self._meter.step() if self._meter else nullcontext():
            result = self.learn(progress, stop)
        consumed = progress.consumed_samples + self._batch
        self._log.add(iteration, consumed, rate, result)
        self._bar.add(iteration, result)
        return self.note(iteration, consumed), result

    def _save_if_due(self, progress: Progress, is_last: bool) -> None:
        """Save every --save-interval steps, and at the end.

        Not in the middle of a NaN streak: such a checkpoint would take the place of a good one, of
        which --keep-last keeps only so many.
        """
        iteration, interval = progress.iteration, self._options.save_interval
        if is_last or iteration == self.steps:
            self.save(progress)
        elif interval and iteration % interval == 0:
            if not progress.nan_streak:
                self.save(progress)
            elif self._options.save:
                logger.warning("iteration %d is not saved: its loss is not a number", iteration)

    def _evaluate_if_due(self, progress: Progress) -> None:
        options = self._options
        if not options.eval_interval or not options.eval_iters:
            return
        if progress.iteration % options.eval_interval:
            return
        if (means := self.evaluate()) is not None:
            numbers = {f"validation {name}": mean for name, mean in means.items()}
            self._log.add_evaluation(progress.iteration, numbers)

    def _write_config(self) -> None:
        if self._options.save is None or self.rank != 0:
            return
        root = Path(self._options.save)
        try:
            root.mkdir(parents=True, exist_ok=True)
            atomic_write_text(root / "config.yaml", yaml.safe_dump(self.config(), sort_keys=False))
        except OSError as error:
            raise ConfigError(f"--save {root}: cannot be written ({error.strerror})") from None

    def _stopped(self, progress: Progress, number: int) -> Stopped:
        save = self._options.save
        kept = f"saved in {save}" if save else "nothing saved: no --save"
        logger.info(
            "asked to stop after iteration %d of %d; %s", progress.iteration, self.steps, kept
        )
        return Stopped(number, progress.iteration)

    def _explain_nan(self, iteration: int, count: int) -> str:
        """Say what happened, and which checkpoint is from before it."""
        save = self._options.save
        good = newest_good(save, iteration - count) if save else None
        kept = f"the newest checkpoint from before is {good}" if good else "none was saved before"
        return (
            f"the loss or its gradient was not a number in {count} steps up to iteration "
            f"{iteration}: lower --lr, or check the data of these steps; {kept}"
        )
