"""The loop of a language model on Megatron: its samples, its steps, what its checkpoints tell."""

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from mindspeed.checkpoint.digests import write_digests
from mindspeed.tune.flop_meter import FlopMeter
from mindspeed_llm.checkpoint.detection import HF_FOLDER
from mindspeed_llm.data.stream import MicroBatches, SampleStream
from mindspeed_llm.training.course import Course
from mindspeed_llm.training.folders import Progress
from mindspeed_llm.training.setup import Setup, Training, check_data
from mindspeed_llm.training.step import ForwardStep, Stepper, StepResult
from mindspeed_llm.training.world import seed_everything

logger = logging.getLogger(__name__)


class Loop(Course):
    """Trains one model on one stream of samples."""

    def __init__(
        self,
        setup: Setup,
        training: Training,
        forward_step: ForwardStep,
        *,
        train: SampleStream,
        valid: SampleStream | None,
        sizes: tuple[int, int],
    ) -> None:
        self._setup, self._training, self._sizes = setup, training, sizes
        self._train, self._valid = train, valid
        options, layout = setup.options, setup.layout
        check_data(training.progress, train.fingerprint, options)
        mean = "over all tokens" if options.calculate_per_token_loss else "over micro-batches"
        logger.info("lm loss is the mean %s of a step", mean)
        if options.save is None:
            logger.warning("no --save was given: what this run learns is not kept")
        epoch = train.samples_per_epoch
        super().__init__(
            options,
            training.checkpoints,
            training.optimizer,
            training.progress,
            steps=options.train_iters or -(-int(epoch * options.epochs) // layout.global_batch),
            batch=layout.global_batch,
            rank=layout.rank,
            world=layout.world,
            flops=self._flops() if options.log_throughput else None,
            meter=FlopMeter() if options.op_cal_tflops else None,
        )
        self._stepper = Stepper(training.wrapped, training.optimizer, forward_step, options, layout)

    def run(self) -> Progress:
        """Train to the last step and return where the run is."""
        self._keep_config()
        return super().run()

    def learn(self, progress: Progress, stop: bool) -> StepResult:
        """Learn from the next global batch."""
        seed_everything(self._setup.options.seed, progress.iteration + 1)
        batches = self._batches(self._train, progress.consumed_samples)
        return self._stepper.train(batches, self._sizes, stop)

    def evaluate(self) -> dict[str, float] | None:
        """Return the mean losses of the first global batches of the validation data."""
        if self._valid is None:
            return None
        count = self._setup.options.eval_iters
        sums: dict[str, float] = {}
        for number in range(count):
            consumed = number * self._setup.layout.global_batch
            losses = self._stepper.evaluate(self._batches(self._valid, consumed), self._sizes)
            sums = {name: sums.get(name, 0.0) + value for name, value in losses.items()}
        return {name: total / count for name, total in sums.items()}

    def note(self, iteration: int, consumed: int) -> Progress:
        """Return what a checkpoint tells: also the model and its adapters."""
        has_optimizer = not self._setup.options.no_save_optim
        shape, lora = self._setup.shape.model_dump(mode="json"), self._setup.lora
        adapters = lora.as_peft() if lora is not None else {}
        data = self._train.fingerprint
        return Progress(iteration, consumed, data, has_optimizer, shape, adapters)

    def save(self, progress: Progress) -> None:
        """Save where the run is."""
        if self._setup.options.overlap_param_gather:  # updated weights may be on their way
            for chunk in self._training.wrapped:
                chunk.start_param_sync(force_sync=True)
        super().save(progress)

    def _batches(self, stream: SampleStream, consumed: int) -> Callable[[], Iterator[Any]]:
        """Return what gives this rank's micro-batches of a step, each time from the first."""
        from megatron.core import parallel_state

        layout = self._setup.layout
        rank = parallel_state.get_data_parallel_rank()
        size = self._setup.options.micro_batch_size

        def begin() -> Iterator[Any]:
            all_batches = MicroBatches(
                stream, size=size, rank=rank, world=layout.dp, consumed=consumed
            )
            return islice(all_batches, layout.micro_batches)

        return begin

    def _flops(self) -> float:
        """Estimate the operations of a step: 6 a weight and token, and those of attention."""
        shape, (length, samples) = self._setup.shape, self._sizes
        layer = shape.hidden_size * (shape.query_size + 2 * shape.kv_size + shape.attention_size)
        layer += 3 * shape.hidden_size * shape.ffn_hidden_size
        weights = shape.num_layers * layer + shape.vocab_size * shape.hidden_size
        attention = 6 * shape.num_layers * length * shape.query_size
        layout = self._setup.layout
        tokens = length * samples * layout.micro_batches * layout.dp
        return float(tokens * (6 * weights + attention))

    def _keep_config(self) -> None:
        """Keep with the checkpoints what the model is."""
        setup = self._setup
        if setup.options.save is None or setup.layout.rank != 0 or setup.config_folder is None:
            return
        target = Path(setup.options.save) / HF_FOLDER
        if setup.config_folder.resolve() != target.resolve():
            from mindspeed_llm.checkpoint.hf_target import copy_small_files

            copy_small_files(setup.config_folder, target)
            write_digests(target, {}, {"kind": "config"})
