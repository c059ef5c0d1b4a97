"""The trainer of language models on Megatron, which every stage extends.

A stage declares its models, opens its data, and gives the batch, the loss and the metrics; train
loop, steps, checkpoints, log and resume are shared.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch

from mindspeed import device
from mindspeed.checkpoint.detection import HF_FOLDER
from mindspeed.checkpoint.digests import write_digests
from mindspeed.config import ConfigError
from mindspeed.distributed.seeds import seed_everything
from mindspeed.ops.linear_cross_entropy.megatron import losses_of
from mindspeed.profiling.options import trace_of
from mindspeed.training.checkpoint_dir import TrainState
from mindspeed.training.loop import TrainLoop, num_steps, run_config
from mindspeed.training.metrics import MeanMetrics, Metric, PendingStep, StopCheck
from mindspeed.training.out_of_memory import with_advice
from mindspeed.training.save_dir_lock import release_on_error
from mindspeed.tune.flop_meter import FlopMeter
from mindspeed.tune.memory_model import MemoryModel
from mindspeed_llm.data.collate import labelled_rows, with_labelled_rows
from mindspeed_llm.data.context_split import ContextSplit, PaddingWatch
from mindspeed_llm.data.indexed import TokenFile
from mindspeed_llm.data.instruction import split_parts
from mindspeed_llm.data.shared_prompts import KEY_BOUNDS, register_shared
from mindspeed_llm.data.stream import MicroBatches, Prefetcher, Sample, SampleStream
from mindspeed_llm.models.config import ModelConfig, language_model
from mindspeed_llm.models.hf_config import set_num_labels
from mindspeed_llm.training.data import check_tokenizer, check_tokens, token_prefixes
from mindspeed_llm.training.expert_load import expert_load_report
from mindspeed_llm.training.joined_samples import has_shortest_rows
from mindspeed_llm.training.memory import BatchRows, accepts, memory_model
from mindspeed_llm.training.model import ModelRole, RoleModel, build_gpt
from mindspeed_llm.training.options import TrainOptions
from mindspeed_llm.training.setup import (
    build_models,
    check_data,
    check_reference,
    check_stage_name,
    document_layout,
    prepare,
)
from mindspeed_llm.training.step import (
    BatchShape,
    collect_outputs,
    evaluate_batch,
    train_on_batch,
)

logger = logging.getLogger(__name__)

Batch = Mapping[str, torch.Tensor]
Part = tuple[float, float]
"""Where a share of the data starts and ends, from 0 to 1."""


class Trainer(ABC):
    """Trains one stage.

    A stage sets `handler`, and implements configure_from_data, open_part, sizes, collate, metrics
    and loss_func. One with several models declares them in `models` and takes what the others say
    about the micro-batches of a step in `prepare_step`; `run_model` is that of a language model
    with labels.
    """

    handler: ClassVar[str]
    """How records of data files are read where --handler-name is not given."""
    splits_sequences: ClassVar[bool] = False
    """Whether the loss may be computed for a part of each sequence (--context-parallel-size)."""
    may_pack: ClassVar[bool] = False
    """Whether preprocess can fill rows with several samples (--pack --neat-pack)."""
    balances_rows: ClassVar[bool] = False
    """Whether rows hold several samples, which --balance-packs shares out by their attention."""
    _rows: BatchRows | None = None
    """The rows of the micro-batch that a model got last."""
    _last_step: PendingStep | None = None
    """The step before, whose result may not have been read."""

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        self.initialize()

    def initialize(self) -> None:
        """Init the process groups, open the data, build the models and load their weights."""
        self.setup = prepare(self.options, splits_sequences=self.splits_sequences)
        self.context_split = ContextSplit.of(self.setup.dims, document_layout(self.options))
        shape = self.setup.shape
        self._padding = PaddingWatch(
            self.context_split,
            is_routed=shape.moe is not None,
            is_shortest=has_shortest_rows(self.options, shape),
            may_pack=self.may_pack,
        )
        with release_on_error(self.setup.save_dir_lock):
            self.data_path = token_prefixes(
                self.options, self.handler, self.setup.config_folder, self.longest_sample
            )
            self.train_data, self.valid_data = self.open_data()
            check_stage_name(self.options, self.stage_name)
            for role in self.models:  # what is wrong with one is found before any is loaded
                self.model_shape(role)
            self.training = build_models(
                self.setup, self.models, self.model_provider, self.model_shape
            )
            check_data(self.training.state, self.train_data.fingerprint, self.options)
            check_reference(self.training.state, self.reference_fingerprint, self.options)
            self.loop = self._make_loop()

    @property
    def longest_sample(self) -> int | None:
        """The limit of samples where data files are preprocessed."""
        return self.options.seq_length

    @property
    def models(self) -> tuple[ModelRole, ...]:
        """The models that the stage needs; the first is the primary one."""
        return (ModelRole("policy"),)

    def model_provider(
        self,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        *,
        role: ModelRole | None = None,
        config: Any = None,
    ) -> Any:
        """Build the model of a role for one pipeline stage; without a role the primary model."""
        setup = self.setup
        return build_gpt(
            setup.options,
            setup.shape if role is None else self.model_shape(role),
            setup.config if config is None else config,
            setup.vocab_size,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )

    def model_shape(self, role: ModelRole) -> ModelConfig:
        """Return the sizes of the model of a role: those of the primary model."""
        return language_model(self.setup.shape, self.options.load)

    @property
    def stage_name(self) -> str:
        """The value of --stage, "" for pretraining."""
        return ""

    @property
    def reference_fingerprint(self) -> str:
        """A name for frozen weights that checkpoints do not hold, "" where there are none."""
        return ""

    def model(self, name: str) -> RoleModel:
        """Return the model of a role."""
        return self.training.models[name]

    @property
    def primary(self) -> RoleModel:
        """The model of the first role."""
        return self.training.models[self.models[0].name]

    # What a stage is made of.

    @abstractmethod
    def configure_from_data(self) -> None:
        """Check the data, and set what batches depend on, before the model is built."""

    @abstractmethod
    def open_part(self, part: Part) -> SampleStream:
        """Open a share of the data."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """The length and the number of samples of a micro-batch, as Megatron's schedule sees it."""

    @property
    def longest(self) -> tuple[int, int]:
        """The same of the longest micro-batch that a step may have."""
        return self.sizes

    @abstractmethod
    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Make the tensors of a micro-batch, in memory of the host; runs on a thread.

        Tensors without dimensions are numbers for the host and stay there.
        """

    def split(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the share of a micro-batch that this rank has of its sequences.

        It says which rows have a label, so that only their losses are computed.
        """
        return with_labelled_rows(self.context_split.split(batch))

    @property
    def context_group(self) -> Any:
        """The ranks that share a sequence; None where a rank has whole ones."""
        from megatron.core import parallel_state

        is_split = self.setup.dims.cp > 1
        return parallel_state.get_context_parallel_group() if is_split else None

    def sum_of_losses(
        self, losses: torch.Tensor, report: dict[str, torch.Tensor]
    ) -> tuple[Any, ...]:
        """Return the losses of whole samples as Megatron's schedules take them, with the report.

        That is their sum and their number; ranks that share sequences have all losses in common,
        and the part of the gradient that is by their own tokens.
        """
        count = losses.new_full((), len(losses), dtype=torch.int32)  # no copy from the host
        if self.setup.dims.cp == 1:
            return losses.sum(), count, report
        return losses.mean(), report  # Megatron multiplies the only number by the ranks

    @property
    @abstractmethod
    def metrics(self) -> Sequence[Metric]:
        """The metrics that loss_func reports for a micro-batch, the loss first."""

    @abstractmethod
    def loss_func(self, batch: Batch, output_tensor: torch.Tensor) -> Any:
        """Return the loss of a micro-batch, its number of tokens, and the report.

        The report holds every metric, and under "tokens" the tokens without padding, on the host.
        """

    def get_batch(self, data_iterator: Iterator[Any]) -> Batch:
        """Take the next micro-batch to the device; sequence boundaries stay known to the host."""
        from mindspeed.ops.packed_batch import register

        on_host = next(data_iterator)
        batch = to_device(on_host)
        for name in ("cu_seqlens", "cu_seqlens_padded", KEY_BOUNDS):
            if name in batch:
                register(batch[name], bounds=on_host[name].tolist())
        register_shared(batch)
        return batch

    def forward_step(
        self, data_iterator: Iterator[Any], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Any]:
        """Run the model on the next micro-batch; return its output and the loss function.

        With `return_schedule_plan` (--overlap-moe-expert-parallel-comm) the model is only planned,
        for Megatron to run it layer by layer, and the plan takes the place of the output.
        """
        batch = self.get_batch(data_iterator)
        loss_func = partial(self.loss_func, batch)
        if return_schedule_plan:
            return model.build_schedule_plan(**self._inputs(batch)), loss_func
        return self.run_model(model, batch), loss_func

    def run_model(self, model: Any, batch: Batch, *, has_labels: bool = True) -> torch.Tensor:
        """Return the loss of every label (b, s), or without labels the model's output (b, s, ...).

        Losses outside of the loss mask do not count, and are not computed where that can be helped.
        There is no mask of size s x s: attention is causal, packed samples have boundaries.
        """
        rows = labelled_rows(batch) if has_labels else None
        self._rows = BatchRows.of(batch["tokens"], rows)
        with losses_of(model, rows):
            output: torch.Tensor = model(**self._inputs(batch, has_labels=has_labels))
        return output

    def _inputs(self, batch: Batch, *, has_labels: bool = True) -> dict[str, Any]:
        return {
            "input_ids": batch["tokens"],
            "position_ids": batch["position_ids"],
            "attention_mask": None,
            "labels": batch["labels"] if has_labels else None,
            "packed_seq_params": packed_seq_params(batch),
            **self._further_labels(batch, has_labels),
        }

    def _further_labels(self, batch: Batch, has_labels: bool) -> dict[str, torch.Tensor]:
        """Return the loss mask for multi-token prediction, whose loss Megatron adds by itself.

        Whole numbers, of which mixed precision leaves the sum exact.
        """
        if not has_labels or not self.setup.shape.mtp_num_layers:
            return {}
        return {"loss_mask": batch["loss_mask"].long()}

    def prepare_step(self, batches: list[Batch]) -> list[Batch]:
        """Return the micro-batches of a step with what other models say about them."""
        return batches

    def collect(
        self,
        model: RoleModel,
        batches: Sequence[Batch],
        collect: Callable[[Batch, torch.Tensor], Any],
        *,
        has_labels: bool = True,
    ) -> list[Any]:
        """Run a model over micro-batches without gradients; return what `collect` makes of each.

        Only ranks of the last pipeline stage have results; the others return an empty list.
        """

        def forward_step(data_iterator: Iterator[Any], chunk: Any) -> tuple[torch.Tensor, Any]:
            batch = self.get_batch(data_iterator)
            return self.run_model(chunk, batch, has_labels=has_labels), partial(collect, batch)

        shape = replace(self._batch_shape, num_micro_batches=len(batches))
        return collect_outputs(model, forward_step, repeated(batches, model), shape)

    # Data.

    def open_data(self) -> tuple[SampleStream, SampleStream | None]:
        """Open the samples to train on, and those to evaluate on if there are any."""
        self.configure_from_data()
        train, valid, _ = split_parts(self.options.split)
        return self.open_part(train), self.open_part(valid) if self.evaluates(valid) else None

    @property
    def balanced_step(self) -> int | None:
        """The samples of a step whose ranks get about equal attention; None for any order."""
        dims = self.setup.dims
        if not self.options.balance_packs:
            return None
        if not self.balances_rows:
            raise ConfigError(
                f"--balance-packs: --stage {self.options.stage} packs no rows: drop it"
            )
        if dims.num_micro_batches % 2:
            raise ConfigError(
                f"--balance-packs pairs rows, and the {dims.num_micro_batches} micro-batches of a "
                "step are not even: use a --global-batch-size that is a multiple of "
                f"{2 * dims.micro_batch_size * dims.dp}"
            )
        return dims.global_batch_size

    def evaluates(self, part: Part) -> bool:
        """Return whether evaluation is asked for, and a part of the data left for it."""
        is_asked = bool(self.options.eval_interval and self.options.eval_iters)
        return is_asked and part[1] > part[0]

    def expect_documents(self) -> None:
        """Prepare for batches of packed documents; to be called before the model is built.

        Ranks that share a sequence pad each document, so the lengths of micro-batches differ, and
        pipeline stages have to send them.
        """
        dims, config = self.setup.dims, self.setup.config
        config.variable_seq_lengths |= dims.cp > 1 and dims.pp > 1

    def check_vocabulary(self, summaries: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise for data of a tokenizer that is not the model's.

        `summaries` are what preprocessing wrote for each prefix, {} where there is none.
        """
        rows = self.setup.shape.vocab_size
        for prefix, summary in summaries.items():
            tokens = summary.get("vocabulary", 0)
            if tokens > rows:
                raise ConfigError(
                    f"{prefix}: its tokenizer ({summary.get('tokenizer')}) has {tokens} tokens, "
                    f"the model's embedding has {rows}: preprocess with the tokenizer of the model"
                )
        check_tokenizer(summaries, self.options, self.setup.config_folder)

    def check_tokens(self, files: Sequence[TokenFile]) -> None:
        """Raise for files with tokens that the model does not have."""
        check_tokens(files, self.setup.shape.vocab_size, self.options.cache_dir)

    # The run.

    def train(self) -> TrainState:
        """Train to the last step; Stopped is raised if the run is asked to stop before."""
        self._write_model_config()
        self.start_prefetch()
        try:
            return with_advice(
                lambda: self.loop.run(self),
                self._memory_model,
                partial(accepts, self.setup),
            )
        finally:
            self._batches.close()
            if self.setup.save_dir_lock is not None:
                self.setup.save_dir_lock.release()

    def start_prefetch(self) -> None:
        """Start the thread that prepares the micro-batches after the consumed samples."""
        self._batches = self._prefetch(self.train_data, self.training.state.consumed_samples)

    def train_step(self, state: TrainState, stop: StopCheck) -> PendingStep:
        """Train the primary model on the next global batch."""
        seed_everything(self.options.seed, state.iteration + 1)
        self._last_step = train_on_batch(
            self.primary,
            self.forward_step,
            self._next_step(self._batches),
            self._batch_shape,
            metrics=self.metrics,
            stop=stop,
            after=self._last_step,
        )
        return self._last_step

    def evaluate(self) -> dict[str, float] | None:
        """Return the mean metrics of the first global batches of the validation data."""
        if self.valid_data is None:
            return None
        means = MeanMetrics()
        batches = self._prefetch(self.valid_data, 0)
        try:
            for _ in range(self.options.eval_iters):
                found = evaluate_batch(
                    self.primary,
                    self.forward_step,
                    self._next_step(batches),
                    self._batch_shape,
                    metrics=self.metrics,
                )
                means.add(found)
        finally:
            batches.close()
        return means.values()

    def state(self, iteration: int, consumed_samples: int) -> TrainState:
        """Return what a checkpoint stores: also the sizes of the model and its adapters."""
        lora = self.setup.lora
        return TrainState(
            iteration,
            consumed_samples,
            data=self.train_data.fingerprint,
            has_optimizer=not self.options.no_save_optim,
            shape=self.setup.shape.model_dump(mode="json"),
            lora=lora.as_peft() if lora is not None else {},
            reference=self.reference_fingerprint,
            stage_name=self.stage_name,
        )

    def config(self) -> dict[str, Any]:
        """Return the options of the run, to be kept with its checkpoints."""
        return run_config(self.options, self.loop.steps)

    def _make_loop(self) -> TrainLoop:
        options, dims = self.options, self.setup.dims
        batch = dims.global_batch_size
        for metric in self.metrics:
            if metric.over:
                logger.info("%s is the mean over %s of a step", metric.name, metric.over)
        epoch = self.train_data.samples_per_epoch
        steps = num_steps(options, lambda: epoch, batch)
        epochs = f"{steps * batch / epoch:.3g} ({epoch} samples)"
        logger.info("iterations: %d, global batch size: %d, epochs: %s", steps, batch, epochs)
        if options.save is None:
            logger.warning("no --save was given: the trained weights are not kept")
        return TrainLoop(
            options,
            checkpoints=self.training.checkpoints,
            optimizers=[m.optimizer for m in self.training.models.values() if m.role.trainable],
            state=self.training.state,
            steps=steps,
            global_batch=batch,
            rank=dims.rank,
            world_size=dims.world,
            flops_per_token=self._flops_per_token() if options.log_throughput else None,
            meter=FlopMeter() if options.op_cal_tflops else None,
            report=expert_load_report(self.primary, options),
            trace=trace_of(options, dims.rank),
        )

    @property
    def _batch_shape(self) -> BatchShape:
        length, samples = self.sizes
        length = self.context_split.padded(length)
        return BatchShape(length, samples, self.setup.dims.num_micro_batches)

    def _prefetch(self, stream: SampleStream, consumed: int) -> Prefetcher[dict[str, torch.Tensor]]:
        """Prepare this rank's micro-batches, from a number of consumed samples on."""
        samples = MicroBatches(
            stream,
            size=self.options.micro_batch_size,
            rank=self.setup.dims.dp_rank,
            world=self.setup.dims.dp,
            consumed=consumed,
        )
        here = device.current()
        # A thread starts on the first device of the machine, where its pinned memory would be.
        return Prefetcher(
            (_pinned(self._padding.watch(self.split(self.collate(few)))) for few in samples),
            begin=partial(here.set_index, here.index()),
        )

    def _next_step(self, batches: Iterator[Any]) -> list[Iterator[Any]]:
        """Return the micro-batches of a step, once for every chunk of the model."""
        step = self.prepare_step(list(islice(batches, self.setup.dims.num_micro_batches)))
        return repeated(step, self.primary)

    def _memory_model(self) -> MemoryModel:
        """Return the memory of the micro-batch at work, of the longest before there is one."""
        length, samples = self.longest
        most = BatchRows(self.context_split.padded(length) // self.setup.dims.cp, samples)
        model = memory_model(self.setup, self.primary.chunks, self._rows or most, most)
        has_value_head = self.model_shape(self.models[0]).num_labels
        return replace(model, vocab_size=0) if has_value_head else model

    def _flops_per_token(self) -> float:
        """Estimate the operations of a token: 6 a weight, and those of attention in a full row."""
        shape, (length, _) = self.setup.shape, self.sizes
        widths = shape.num_layers * (shape.query_size + 2 * shape.kv_size + shape.attention_size)
        widths += 3 * sum(map(shape.mlp_width, range(shape.num_layers)))
        weights = (widths + shape.vocab_size) * shape.hidden_size
        attention = 6 * shape.num_layers * length * shape.query_size
        return float(6 * weights + attention)

    def _write_model_config(self) -> None:
        """Copy the config and tokenizer of the model to the checkpoints."""
        setup = self.setup
        if setup.options.save is None or setup.dims.rank != 0 or setup.config_folder is None:
            return
        target = Path(setup.options.save) / HF_FOLDER
        if setup.config_folder.resolve() != target.resolve():
            from mindspeed.checkpoint.hf_folder import copy_small_files

            copy_small_files(setup.config_folder, target)
            if labels := self.model_shape(self.models[0]).num_labels:
                set_num_labels(target / "config.json", labels)
            write_digests(target, {}, {"kind": "config"})


def repeated(batches: Sequence[Batch], model: RoleModel) -> list[Iterator[Any]]:
    """Return the micro-batches once for every chunk of a model."""
    return [iter(batches) for _ in model.wrapped]


def to_device(batch: Batch) -> dict[str, torch.Tensor]:
    """Copy a micro-batch to the device; numbers for the host stay where they are."""
    here = device.current().torch_device
    return {
        name: values.to(here, non_blocking=True) if values.dim() else values
        for name, values in batch.items()
    }


def packed_seq_params(batch: Batch) -> Any:
    """Return the boundaries of samples that share a row, for attention; None if none do."""
    if "cu_seqlens" not in batch:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    boundaries, longest = batch["cu_seqlens"], int(batch["max_seqlen"])
    padded = batch.get("cu_seqlens_padded")
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=batch.get(KEY_BOUNDS, boundaries),
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _pinned(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy what goes to the device into memory that it can fetch by itself."""
    return {name: values.pin_memory() if values.dim() else values for name, values in batch.items()}
