"""The train loop of every suite: step after step, with log lines, evaluations and checkpoints."""

import gc
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import yaml

from mindspeed import device
from mindspeed.checkpoint.commit import atomic_write_text
from mindspeed.config import ConfigError
from mindspeed.config.yaml_file import read_yaml
from mindspeed.profiling import Trace
from mindspeed.training.checkpoint_dir import TrainState, latest_finite
from mindspeed.training.entry import RunFailed, Stopped, StopRequest
from mindspeed.training.log import ProgressBar, StepClock, TrainingLog
from mindspeed.training.metrics import PendingStep, StepResult, StopCheck
from mindspeed.training.options import RunOptions
from mindspeed.training.schedule import make_schedule
from mindspeed.training.trackers import WandbRun, board_folder
from mindspeed.tune.flop_meter import FlopMeter

logger = logging.getLogger(__name__)


class NotFinite(RunFailed):
    """Training cannot continue: losses or gradients are not finite."""


class Checkpoints(Protocol):
    """Saves the state of a run; a save in the background is completed by `poll` or `finish`."""

    def save(
        self, state: TrainState, *, keep_last: int | None = None, in_background: bool = False
    ) -> None:
        """Save the run, if it has a directory for it."""

    def poll(self) -> None:
        """Complete a save in the background if all ranks have written."""

    def finish(self) -> None:
        """Wait for a save in the background and complete it."""


class Trainer(Protocol):
    """What a train loop runs: the steps of one task on one kind of model."""

    def train_step(self, state: TrainState, stop: StopCheck) -> PendingStep:
        """Train on the batch after `state`.

        The result of the step before may not have been read: where the update depends on it, this
        waits for it.
        """

    def evaluate(self) -> dict[str, float] | None:
        """Return the metrics on the validation data, if there is any."""

    def state(self, iteration: int, consumed_samples: int) -> TrainState:
        """Return what a checkpoint after this iteration stores."""

    def config(self) -> dict[str, Any]:
        """Return the options of the run, to be kept with its checkpoints."""


class StepReport(Protocol):
    """A report of the state of the model in the log."""

    def start(self, iteration: int) -> Callable[[TrainingLog], None] | None:
        """Collect what there is to report of a step that is queued; every rank calls this.

        Returns what writes it, to be called when the step is done; None where nothing is due.
        """


class TrainLoop:
    """Runs a trainer to the last step, or until asked to stop.

    On a device that works asynchronously the result of a step is read while the device is busy with
    the next one, so that it never waits for the host; only a step that a save or an evaluation
    follows is waited for. A run that is asked to stop therefore takes one step more.

    A trainer may hold its loop; the loop does not hold the trainer, so that models and the workers
    of data loaders end with the last reference to it.
    """

    def __init__(
        self,
        options: RunOptions,
        *,
        checkpoints: Checkpoints,
        optimizers: Sequence[Any],
        state: TrainState,
        steps: int,
        global_batch: int,
        rank: int,
        world_size: int,
        flops_per_token: float | None = None,
        meter: FlopMeter | None = None,
        report: StepReport | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._options, self._checkpoints = options, checkpoints
        self._optimizers, self._initial_state = optimizers, state
        self._global_batch, self._meter = global_batch, meter
        self._report, self._trace = report, trace
        self.steps, self.rank = steps, rank
        self._schedule = make_schedule(options, steps)
        file = options.log_file or (f"{options.save}/log.jsonl" if options.save else None)
        self.log = TrainingLog(
            interval=options.log_interval,
            total=steps,
            global_batch=global_batch,
            is_writer=rank == 0,
            file=Path(file) if file else None,
            tensorboard_dir=board_folder(options),
            tracker=WandbRun(options) if "wandb" in options.report_to and rank == 0 else None,
            flops_per_token=flops_per_token,
            meter=meter,
            world_size=world_size,
        )
        self._bar = ProgressBar(steps, is_writer=rank == 0)
        self._clock = StepClock()

    def run(self, trainer: Trainer) -> TrainState:
        """Train to the last step and return the state of the run.

        Raises Stopped, once the checkpoint is written, if the run is asked to stop before that.
        """
        state = self._initial_state
        if state.iteration >= self.steps:
            logger.info("all %d iterations are done: raise --train-iters or --epochs", self.steps)
        else:
            self._write_config(trainer, is_resumed=state.iteration > 0)
        self.log.start(state.iteration)
        self._bar.start(state.iteration)
        gc.freeze()  # collections, which every save asks for, need not visit what exists now
        try:
            with StopRequest() as request:
                state = self._run_steps(trainer, state, request)
                self._checkpoints.finish()
                if state.iteration < self.steps:
                    raise self._stopped(state, request.signal or signal.SIGTERM)
        finally:
            gc.unfreeze()
            if self._trace is not None:
                self._trace.end()
            self._bar.stop()
            self.log.finish()
        if self.rank == 0:
            peak = device.current().max_memory_allocated() / 2**30
            host = device.known()["cpu"].max_memory_allocated() / 2**30
            logger.info("peak memory of rank 0: %.2f GiB, on the host %.2f GiB", peak, host)
        return state

    def save(self, state: TrainState) -> None:
        """Save a checkpoint."""
        self._checkpoints.save(
            state, keep_last=self._options.keep_last, in_background=self._options.async_save
        )

    def _run_steps(self, trainer: Trainer, state: TrainState, request: StopRequest) -> TrainState:
        streak, queued = state.nan_streak, deque[tuple[int, PendingStep]]()
        is_last = state.iteration >= self.steps
        while not is_last:
            with _reading_on_error(queued):
                state, pending = self._queue(trainer, state, request.is_set)
            queued.append((state.iteration, pending))
            is_last = state.iteration == self.steps
            waits = pending.is_read or self._waits_for(state.iteration)
            while queued and (len(queued) > 1 or is_last or waits):
                iteration, pending = queued.popleft()
                result = pending.wait()
                streak = 0 if result.is_finite else streak + 1
                if streak >= self._options.max_nan_iterations:
                    self._checkpoints.finish()
                    raise NotFinite(self._explain_nan(iteration, streak))
                is_last |= result.should_stop
            started = time.perf_counter()
            self._checkpoints.poll()
            if queued:  # the device works meanwhile
                continue
            state = replace(state, nan_streak=streak)
            self._save_if_due(state, is_last)
            self._evaluate_if_due(trainer, state)
            for clock in (self.log, self._bar):
                clock.exclude(time.perf_counter() - started)
        return state

    def _waits_for(self, iteration: int) -> bool:
        """Return whether the result of a step is needed before the next one is queued."""
        options = self._options
        return (
            not device.current().is_asynchronous
            or self._meter is not None
            or (options.save is not None and _is_at(options.save_interval, iteration))
            or (options.eval_iters > 0 and _is_at(options.eval_interval, iteration))
        )

    def step(self, trainer: Trainer, state: TrainState) -> tuple[TrainState, StepResult]:
        """Train one step and log it; return the state after it."""
        after, pending = self._queue(trainer, state, lambda: False)
        return after, pending.wait()

    def _queue(
        self, trainer: Trainer, state: TrainState, stop: StopCheck
    ) -> tuple[TrainState, PendingStep]:
        """Queue one step, which is logged when its result is read; return the state after it."""
        rate = 0.0
        for optimizer in self._optimizers:
            rate = self._schedule.apply(optimizer, state.iteration)
        with (
            self._meter.step() if self._meter else nullcontext(),
            self._trace.step(state.iteration + 1) if self._trace else nullcontext(),
        ):
            pending = trainer.train_step(state, stop)
        consumed = state.consumed_samples + self._global_batch
        after = trainer.state(state.iteration + 1, consumed)
        report = self._report.start(after.iteration) if self._report is not None else None
        pending.when_read(partial(self._log_step, after, rate, report))
        return after, pending

    def _log_step(
        self,
        after: TrainState,
        rate: float,
        report: Callable[[TrainingLog], None] | None,
        result: StepResult,
    ) -> None:
        finished = self._clock.time_of(result.done)
        self.log.add(after.iteration, after.consumed_samples, rate, result, finished)
        if report is not None:
            report(self.log)
        self._bar.add(after.iteration, result, finished)

    def _save_if_due(self, state: TrainState, is_last: bool) -> None:
        """Save every --save-interval steps, and at the end.

        Not in the middle of a NaN streak: such a checkpoint would replace a good one, of which
        --keep-last keeps only so many.
        """
        iteration = state.iteration
        if is_last:
            self.save(state)
        elif _is_at(self._options.save_interval, iteration):
            if not state.nan_streak:
                self.save(state)
            elif self._options.save:
                logger.warning("iteration %d is not saved: its loss is not finite", iteration)

    def _evaluate_if_due(self, trainer: Trainer, state: TrainState) -> None:
        options = self._options
        if not options.eval_iters or not _is_at(options.eval_interval, state.iteration):
            return
        if (metrics := trainer.evaluate()) is not None:
            named = {f"validation {name}": value for name, value in metrics.items()}
            self.log.add_evaluation(state.iteration, named)

    def _write_config(self, trainer: Trainer, *, is_resumed: bool) -> None:
        if self._options.save is None or self.rank != 0:
            return
        root, values = Path(self._options.save), trainer.config()
        with suppress(ConfigError):  # a file that is damaged or gone is written again
            if is_resumed:
                _log_changes(read_yaml(root / "config.yaml"), values)
        content = _in_two_parts(values, self._options)
        try:
            root.mkdir(parents=True, exist_ok=True)
            atomic_write_text(root / "config.yaml", content)
        except OSError as error:
            raise ConfigError(f"--save {root}: cannot be written ({error.strerror})") from None

    def _stopped(self, state: TrainState, number: int) -> Stopped:
        save = self._options.save
        kept = f"saved in {save}" if save else "nothing saved: no --save"
        logger.info("asked to stop after iteration %d of %d; %s", state.iteration, self.steps, kept)
        return Stopped(number, state.iteration)

    def _explain_nan(self, iteration: int, count: int) -> str:
        """Return what happened, and the newest checkpoint from before it."""
        save = self._options.save
        good = latest_finite(save, iteration - count) if save else None
        kept = f"the newest checkpoint from before is {good}" if good else "none was saved before"
        return (
            f"the loss or its gradient was not finite in {count} steps up to iteration "
            f"{iteration}: lower --lr, or check the data of these steps; {kept}"
        )


@contextmanager
def _reading_on_error(queued: Iterable[tuple[int, PendingStep]]) -> Iterator[None]:
    """Log the steps before one that fails."""
    try:
        yield
    except Exception:
        for _, pending in queued:
            with suppress(Exception):  # the device may have failed
                pending.wait()
        raise


def _is_at(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0


def _in_two_parts(values: Mapping[str, Any], options: RunOptions) -> str:
    """Return a YAML file: what was chosen before what is as it is by default."""
    defaults = type(options).model_construct().model_dump(mode="json")
    chosen = {k: v for k, v in values.items() if k not in defaults or v != defaults[k]}
    others = {k: v for k, v in values.items() if k not in chosen}
    parts = [yaml.safe_dump(part, sort_keys=False) for part in (chosen, others) if part]
    return "\n# as by default\n".join(parts)


def _log_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Name the options that a resumed run has other values for."""
    if changes := list(_changes(before, after)):
        logger.info("resumed with other options than before: %s", ", ".join(changes))


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in after.items():
        if name not in before or before[name] == value:
            continue
        if isinstance(before[name], dict) and isinstance(value, dict):
            yield from _changes(before[name], value, f"{path}{name}.")
        else:
            yield f"{path}{name} {_shown(before[name])} -> {_shown(value)}"


def _shown(value: Any) -> str:
    return "default" if value is None else str(value)


def run_config(options: RunOptions, steps: int) -> dict[str, Any]:
    """Return options that run as many steps again, to be kept with the checkpoints."""
    return options.model_dump(mode="json") | {"train_iters": steps, "epochs": None}


def num_steps(options: RunOptions, samples_per_epoch: Callable[[], int], global_batch: int) -> int:
    """Return the steps of a run; only with --epochs the data needs to have a length."""
    if options.train_iters is not None:
        return options.train_iters
    assert options.epochs is not None  # check_run: one of the two is given
    return -(-int(samples_per_epoch() * options.epochs) // global_batch)
