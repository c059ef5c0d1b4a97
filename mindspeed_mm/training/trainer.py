"""The trainer of a sharded model: a script's loaders, its callbacks, the train steps."""

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

from mindspeed.config import ConfigError, Options
from mindspeed.distributed.seeds import seed_step
from mindspeed.training.checkpoint_dir import TrainState
from mindspeed.training.entry import Stopped
from mindspeed.training.loop import TrainLoop, num_steps, run_config
from mindspeed.training.metrics import PendingStep, StopCheck
from mindspeed_mm.training.arguments import FILES, FSDP2
from mindspeed_mm.training.batches import Batches
from mindspeed_mm.training.callbacks import Callbacks, NumSamples
from mindspeed_mm.training.profile import trace_of
from mindspeed_mm.training.setup import Setup, adapters
from mindspeed_mm.training.step import FsdpStep

logger = logging.getLogger(__name__)

PLAIN = (str, int, float, bool)
"""Values of a script's own arguments that a file can hold."""


class FsdpTrainer:
    """Trains one sharded model on the batches of a script's loaders."""

    def __init__(self, setup: Setup, callbacks: Callbacks) -> None:
        options, dims = setup.run.options, setup.dims
        self._setup, self._options = setup, options
        self._train, self._valid, self._test = self._open(callbacks)
        mean = "over all tokens" if setup.is_per_token else "over micro-batches"
        logger.info("the loss is the mean %s of a step", mean)
        self.loop = TrainLoop(
            options,
            checkpoints=setup.checkpoints,
            optimizers=[setup.optimizer],
            state=setup.state,
            steps=num_steps(options, self._train.samples_per_epoch, dims.global_batch_size),
            global_batch=dims.global_batch_size,
            rank=dims.rank,
            world_size=dims.world,
            trace=trace_of(setup.run.mm.tool, dims.rank),
        )
        self._step = FsdpStep(
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
        self._batches = self._train.endless(setup.state.consumed_samples)

    def train(self) -> TrainState:
        """Train to the last step; then evaluate on the test data, if there is any."""
        try:
            state = self.loop.run(self)
        except Stopped:
            self._train.finish(is_complete=False)
            raise
        self._train.finish()
        if self._test is not None:
            means = self._step.evaluate(self._to_evaluate(self._test))
            named = {f"test {name}": mean for name, mean in means.items()}
            self.loop.log.add_evaluation(state.iteration, named)
        return state

    def train_step(self, state: TrainState, stop: StopCheck) -> PendingStep:
        """Train on the next global batch."""
        iteration, args = state.iteration + 1, self._setup.args
        args.iteration, args.consumed_train_samples = iteration, state.consumed_samples
        seed_step(self._options.seed, iteration, self._setup.dims.dp_rank)
        return self._step.train(self._batches, stop)

    def evaluate(self) -> dict[str, float] | None:
        """Return the mean metrics on the validation data; pass on what else is to be shown."""
        if self._valid is None:
            return None
        means = self._step.evaluate(self._to_evaluate(self._valid))
        if self._show is not None:  # every rank runs the sharded model, only the writer's shows
            step = islice(self._valid.once(), self._setup.dims.num_micro_batches)
            shown = self._step.to_show(step)
            if self.loop.log.board is not None:
                self._show(shown, self._setup.args.iteration, self.loop.log.board)
        return means

    def state(self, iteration: int, consumed_samples: int) -> TrainState:
        """Return what a checkpoint stores: also the adapters, which an export merges."""
        return TrainState(
            iteration,
            consumed_samples,
            has_optimizer=not self._options.no_save_optim,
            lora=adapters(self._setup.run),
        )

    def config(self) -> dict[str, Any]:
        """Return the run as one file that can be run again; free sections stay in their files."""
        run = self._setup.run
        flags = run_config(self._options, self.loop.steps) | {"fsdp2_config_path": None}
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
