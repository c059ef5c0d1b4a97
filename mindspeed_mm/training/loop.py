"""The loop of a sharded model: a script's loaders, its callbacks, the steps."""

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

from mindspeed.config import ConfigError, Options
from mindspeed.distributed.process_groups import set_collective_timeout
from mindspeed.distributed.seeds import seed_step
from mindspeed.training.entry import Stopped
from mindspeed.training.metrics import StepResult
from mindspeed_llm.training.course import Course
from mindspeed_llm.training.folders import Progress
from mindspeed_mm.training.arguments import FILES, FSDP2
from mindspeed_mm.training.batches import Batches
from mindspeed_mm.training.callbacks import Callbacks, NumSamples
from mindspeed_mm.training.profile import Trace
from mindspeed_mm.training.setup import Setup, adapters
from mindspeed_mm.training.step import FsdpStepper

logger = logging.getLogger(__name__)

PLAIN = (str, int, float, bool)
"""Values of a script's own arguments that a file can hold."""


class FsdpLoop(Course):
    """Trains one sharded model on what a script's loaders give."""

    def __init__(self, setup: Setup, callbacks: Callbacks) -> None:
        options, dims = setup.run.options, setup.dims
        self._setup = setup
        train, self._valid, self._test = self._open(callbacks)
        steps = options.train_iters or -(
            -int(train.samples_per_epoch() * options.epochs) // dims.global_batch_size
        )
        mean = "over all tokens" if setup.is_per_token else "over micro-batches"
        logger.info("the loss is the mean %s of a step", mean)
        super().__init__(
            options,
            setup.checkpoints,
            setup.optimizer,
            setup.progress,
            steps=steps,
            batch=dims.global_batch_size,
            rank=dims.rank,
            world=dims.world,
        )
        self._stepper = FsdpStepper(
            setup.model,
            setup.optimizer,
            callbacks,
            dims,
            clip=options.clip_grad,
            per_token=setup.is_per_token,
        )
        self._show = callbacks.show
        if self._show is not None and options.tensorboard_dir is None:
            logger.warning("process_non_loss_data_func is not called without --tensorboard-dir")
            self._show = None
        self._trace = Trace(setup.run.mm.tool, dims.rank)
        self._train = train
        self._batches = train.endless(setup.progress.consumed_samples)

    def run(self) -> Progress:
        """Train to the last step; then evaluate on the test data, if there is any."""
        try:
            progress = super().run()
        except Stopped as stopped:
            self._trace.end(stopped.iteration)
            self._train.finish()
            raise
        self._trace.end(progress.iteration)
        self._train.finish()
        if self._test is not None:
            means = self._stepper.evaluate(self._to_evaluate(self._test))
            self._log.add_evaluation(
                progress.iteration, {f"test {k}": mean for k, mean in means.items()}
            )
        return progress

    def learn(self, progress: Progress, stop: bool) -> StepResult:
        """Learn from the next global batch."""
        iteration, args = progress.iteration + 1, self._setup.args
        args.iteration, args.consumed_train_samples = iteration, progress.consumed_samples
        seed_step(self._options.seed, iteration, self._setup.dims.dp_rank)
        with self._trace.step(iteration):
            return self._stepper.train(self._batches, stop)

    def evaluate(self) -> dict[str, float] | None:
        """Return the mean losses on the validation data; show what else there is to show."""
        if self._valid is None:
            return None
        means = self._stepper.evaluate(self._to_evaluate(self._valid))
        if self._show is not None:  # every rank runs the sharded model, the writer's shows
            step = islice(self._valid.once(), self._setup.dims.num_micro_batches)
            shown = self._stepper.to_show(step)
            if self._log.board is not None:
                self._show(shown, self._setup.args.iteration, self._log.board)
        return means

    def note(self, iteration: int, consumed: int) -> Progress:
        """Return what a checkpoint tells: also of adapters, which an export adds to the weights."""
        return Progress(
            iteration,
            consumed,
            has_optimizer=not self._options.no_save_optim,
            lora=adapters(self._setup.run),
        )

    def save(self, progress: Progress) -> None:
        """Save where the run is; the first save may make groups of its own."""
        super().save(progress)
        set_collective_timeout(self._options.distributed_timeout_minutes)

    def config(self) -> dict[str, Any]:
        """Return what was run as one file that can be run; free sections stay in theirs."""
        run, flags = self._setup.run, super().config() | {"fsdp2_config_path": None}
        entries: dict[str, Any] = {FSDP2: run.fsdp.model_dump(mode="json")}
        for name, flag in FILES.items():
            if isinstance(section := getattr(run.mm, name), Options):
                entries[name] = section.model_dump(mode="json")
                flags[flag] = None
        own = {name: value for name, value in run.extra.items() if isinstance(value, PLAIN)}
        return entries | {"training": flags | own}

    def _open(self, callbacks: Callbacks) -> tuple[Batches, Batches | None, Batches | None]:
        """Ask the script for its loaders."""
        setup, options = self._setup, self._setup.run.options
        found = callbacks.datasets(self._counts())
        names = ("train", "validation", "test")
        opened = [
            None if loader is None else Batches(loader, name, setup.dims, options.seed)
            for name, loader in zip(names, found)
        ]
        if opened[0] is None:
            raise ConfigError("the data provider returned no train loader: it has to return one")
        if opened[1] is None and options.eval_interval and options.eval_iters:
            raise ConfigError(
                f"--eval-interval {options.eval_interval}: there is no data to evaluate on: give "
                "val_dataset or val_rate in the data section, or drop --eval-interval"
            )
        return opened[0], opened[1], opened[2] if options.eval_iters else None

    def _counts(self) -> NumSamples:
        """Return how many samples will be taken for training, validation and test."""
        options, batch = self._setup.run.options, self._setup.dims.global_batch_size
        steps = options.train_iters
        times = (steps or 0) // options.eval_interval + 1 if options.eval_interval else 0
        evaluation = options.eval_iters * batch
        return (None if steps is None else steps * batch, times * evaluation, evaluation)

    def _to_evaluate(self, batches: Batches) -> Iterator[Any]:
        count = self._options.eval_iters * self._setup.dims.num_micro_batches
        return islice(batches.once(), count)
