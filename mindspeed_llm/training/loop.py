"""The loop: step after step until the end, with lines, evaluations and checkpoints on the way."""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from mindspeed.tune.flop_meter import FlopMeter
from mindspeed_llm.checkpoint.commit import write_file
from mindspeed_llm.checkpoint.detection import HF_FOLDER
from mindspeed_llm.data.stream import MicroBatches, SampleStream
from mindspeed_llm.training.bar import StepBar
from mindspeed_llm.training.checkpoint import Progress
from mindspeed_llm.training.log import TrainingLog
from mindspeed_llm.training.schedule import make_schedule
from mindspeed_llm.training.setup import Setup, Training, check_data
from mindspeed_llm.training.step import ForwardStep, Stepper
from mindspeed_llm.training.stop import StopRequest
from mindspeed_llm.training.world import seed_everything

logger = logging.getLogger(__name__)


class NotANumber(RuntimeError):
    """Training cannot go on: losses or gradients are not numbers."""


class Loop:
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
        epoch = train.samples_per_epoch
        self.steps: int = options.train_iters or -(
            -int(epoch * options.epochs) // layout.global_batch
        )
        self._schedule = make_schedule(options, self.steps)
        self._stepper = Stepper(training.wrapped, training.optimizer, forward_step, options, layout)
        self._meter = FlopMeter() if options.op_cal_tflops else None
        self._log = self._make_log()
        self._bar = StepBar(self.steps, is_writer=layout.rank == 0)

    def run(self) -> Progress:
        """Train to the end, or until asked to stop; return how far it came."""
        progress = self._training.progress
        self._write_run_files()
        self._log.begin(progress.iteration)
        self._bar.begin(progress.iteration)
        gc.freeze()  # collections, which every save asks for, need not visit all that is there now
        try:
            with StopRequest() as request:
                progress = self._steps(progress, request)
                self._training.checkpoints.finish()
        finally:
            gc.unfreeze()
            self._bar.end()
        if progress.iteration < self.steps:
            save = self._setup.options.save
            kept = f"saved in {save}" if save else "nothing saved: no --save"
            logger.info("asked to stop after iteration %d; %s", progress.iteration, kept)
        return progress

    def _steps(self, progress: Progress, request: StopRequest) -> Progress:
        bad = 0
        while progress.iteration < self.steps:
            progress, result = self._step(progress, request.came)
            began = time.perf_counter()
            self._training.checkpoints.poll()
            bad = 0 if result.is_finite else bad + 1
            if bad >= self._setup.options.max_nan_iterations:
                self._training.checkpoints.finish()
                raise NotANumber(self._trouble(progress, bad))
            if self._is_save_due(progress.iteration) or result.is_asked_to_stop:
                self._save(progress)
            self._evaluate_if_due(progress)
            for shown in (self._log, self._bar):
                shown.leave_out(time.perf_counter() - began)
            if result.is_asked_to_stop:
                break
        return progress

    def _is_save_due(self, iteration: int) -> bool:
        interval = self._setup.options.save_interval
        return iteration == self.steps or bool(interval) and iteration % interval == 0

    def _step(self, progress: Progress, stop: bool) -> tuple[Progress, Any]:
        iteration = progress.iteration + 1
        seed_everything(self._setup.options.seed, iteration)
        rate = self._schedule.apply(self._training.optimizer, progress.iteration)
        batches = self._batches(self._train, progress.consumed_samples)
        with self._meter.step() if self._meter else nullcontext():
            result = self._stepper.train(batches, self._sizes, stop)
        consumed = progress.consumed_samples + self._setup.layout.global_batch
        self._log.add(iteration, consumed, rate, result)
        self._bar.add(iteration, result)
        return self._progress(iteration, consumed), result

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

    def _evaluate_if_due(self, progress: Progress) -> None:
        options = self._setup.options
        if self._valid is None or not options.eval_interval or not options.eval_iters:
            return
        if progress.iteration % options.eval_interval:
            return
        sums: dict[str, float] = {}
        for number in range(options.eval_iters):
            consumed = number * self._setup.layout.global_batch
            losses = self._stepper.evaluate(self._batches(self._valid, consumed), self._sizes)
            sums = {name: sums.get(name, 0.0) + value for name, value in losses.items()}
        means = {f"validation {name}": total / options.eval_iters for name, total in sums.items()}
        self._log.note(progress.iteration, means)

    def _progress(self, iteration: int, consumed: int) -> Progress:
        has_optimizer = not self._setup.options.no_save_optim
        shape, lora = self._setup.shape.model_dump(mode="json"), self._setup.lora
        adapters = lora.as_peft() if lora is not None else {}
        data = self._train.fingerprint
        return Progress(iteration, consumed, data, has_optimizer, shape, adapters)

    def _save(self, progress: Progress) -> None:
        options = self._setup.options
        if options.overlap_param_gather:  # updated weights may still be on their way
            for chunk in self._training.wrapped:
                chunk.start_param_sync(force_sync=True)
        self._training.checkpoints.save(
            progress, keep_last=options.keep_last, in_background=options.async_save
        )

    def _make_log(self) -> TrainingLog:
        options, layout = self._setup.options, self._setup.layout
        file = options.log_file or (f"{options.save}/log.jsonl" if options.save else None)
        mean = "over all tokens" if options.calculate_per_token_loss else "over micro-batches"
        logger.info("lm loss is the mean %s of a step", mean)
        return TrainingLog(
            every=options.log_interval,
            total=self.steps,
            batch=layout.global_batch,
            is_writer=layout.rank == 0,
            file=Path(file) if file else None,
            tensorboard=options.tensorboard_dir,
            flops_per_step=self._flops() if options.log_throughput else None,
            meter=self._meter,
            world=layout.world,
        )

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

    def _write_run_files(self) -> None:
        """Keep with the checkpoints what was run, and what the model is."""
        setup = self._setup
        if setup.options.save is None or setup.layout.rank != 0:
            return
        root = Path(setup.options.save)
        root.mkdir(parents=True, exist_ok=True)
        values = setup.options.model_dump(mode="json") | {"train_iters": self.steps, "epochs": None}
        write_file(root / "config.yaml", yaml.safe_dump(values, sort_keys=False))
        target = root / HF_FOLDER
        if setup.config_folder is not None and setup.config_folder.resolve() != target.resolve():
            from mindspeed_llm.checkpoint.hf_target import copy_small_files

            copy_small_files(setup.config_folder, target)

    def _trouble(self, progress: Progress, count: int) -> str:
        last = self._setup.options.save or "no checkpoint"
        return (
            f"the loss or its gradient was not a number in {count} steps up to "
            f"{progress.iteration}: lower --lr, or look at the data of these steps; the last "
            f"checkpoint ({last}) is from before, and was not touched"
        )
