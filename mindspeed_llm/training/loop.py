"""The loop of a language model on Megatron: its samples, its steps, what its checkpoints tell."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, tee
from pathlib import Path
from typing import Any

import torch

from mindspeed import device
from mindspeed.checkpoint.detection import HF_FOLDER
from mindspeed.checkpoint.digests import write_digests
from mindspeed.distributed.seeds import seed_everything
from mindspeed.tune.flop_meter import FlopMeter
from mindspeed_llm.data.stream import MicroBatches, Prefetcher, Sample, SampleStream
from mindspeed_llm.training.course import Course
from mindspeed_llm.training.folders import Progress
from mindspeed_llm.training.setup import Setup, Training, check_data
from mindspeed_llm.training.step import ForwardStep, Stepper, StepResult

logger = logging.getLogger(__name__)

Collate = Callable[[Sequence[Sample]], dict[str, torch.Tensor]]


class Loop(Course):
    """Trains one model on one stream of samples."""

    def __init__(
        self,
        setup: Setup,
        training: Training,
        forward_step: ForwardStep,
        collate: Collate,
        *,
        train: SampleStream,
        valid: SampleStream | None,
        sizes: tuple[int, int],
    ) -> None:
        self._setup, self._training, self._sizes = setup, training, sizes
        self._train, self._valid, self._collate = train, valid, collate
        options, dims = setup.options, setup.dims
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
            steps=options.train_iters or -(-int(epoch * options.epochs) // dims.global_batch_size),
            batch=dims.global_batch_size,
            rank=dims.rank,
            world=dims.world,
            flops=self._flops() if options.log_throughput else None,
            meter=FlopMeter() if options.op_cal_tflops else None,
        )
        self._stepper = Stepper(training.wrapped, training.optimizer, forward_step, options, dims)

    def run(self) -> Progress:
        """Train to the last step and return where the run is."""
        self._keep_config()
        self._batches = self._prefetch(self._train, self._training.progress.consumed_samples)
        try:
            return super().run()
        finally:
            self._batches.close()

    def learn(self, progress: Progress, stop: bool) -> StepResult:
        """Train on the next global batch."""
        seed_everything(self._setup.options.seed, progress.iteration + 1)
        return self._stepper.train(self._next_step(self._batches), self._sizes, stop)

    def evaluate(self) -> dict[str, float] | None:
        """Return the mean losses of the first global batches of the validation data."""
        if self._valid is None:
            return None
        count = self._setup.options.eval_iters
        sums: dict[str, float] = {}
        batches = self._prefetch(self._valid, 0)
        try:
            for _ in range(count):
                losses = self._stepper.evaluate(self._next_step(batches), self._sizes)
                sums = {name: sums.get(name, 0.0) + value for name, value in losses.items()}
        finally:
            batches.close()
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

    def _prefetch(self, stream: SampleStream, consumed: int) -> Prefetcher[dict[str, torch.Tensor]]:
        """Prepare this rank's micro-batches, from a number of consumed samples on."""
        from megatron.core import parallel_state

        samples = MicroBatches(
            stream,
            size=self._setup.options.micro_batch_size,
            rank=parallel_state.get_data_parallel_rank(),
            world=self._setup.dims.dp,
            consumed=consumed,
        )
        here = device.current()
        # A thread begins on the first device of the machine, where its pinned memory would be.
        return Prefetcher(
            (_pinned(self._collate(few)) for few in samples),
            begin=partial(here.set_index, here.index()),
        )

    def _next_step(self, batches: Iterator[Any]) -> list[Iterator[Any]]:
        """Return the micro-batches of a step, once for every chunk of the model."""
        chunks = len(self._training.wrapped)
        return list(tee(islice(batches, self._setup.dims.num_micro_batches), chunks))

    def _flops(self) -> float:
        """Estimate the operations of a step: 6 a weight and token, and those of attention."""
        shape, (length, samples) = self._setup.shape, self._sizes
        layer = shape.hidden_size * (shape.query_size + 2 * shape.kv_size + shape.attention_size)
        layer += 3 * shape.hidden_size * shape.ffn_hidden_size
        weights = shape.num_layers * layer + shape.vocab_size * shape.hidden_size
        attention = 6 * shape.num_layers * length * shape.query_size
        dims = self._setup.dims
        tokens = length * samples * dims.num_micro_batches * dims.dp
        return float(tokens * (6 * weights + attention))

    def _keep_config(self) -> None:
        """Keep with the checkpoints what the model is."""
        setup = self._setup
        if setup.options.save is None or setup.dims.rank != 0 or setup.config_folder is None:
            return
        target = Path(setup.options.save) / HF_FOLDER
        if setup.config_folder.resolve() != target.resolve():
            from mindspeed.checkpoint.hf_folder import copy_small_files

            copy_small_files(setup.config_folder, target)
            write_digests(target, {}, {"kind": "config"})


def _pinned(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy what goes to the device into memory that it can fetch by itself."""
    return {name: values.pin_memory() if values.dim() else values for name, values in batch.items()}
