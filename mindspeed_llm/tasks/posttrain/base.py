"""What every trainer shares: the model, the data and the loop; a task says the rest."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mindspeed import device
from mindspeed.training.save_dir_lock import release_on_error
from mindspeed_llm.data.indexed import TokenFile
from mindspeed_llm.data.instruction import InstructionData, open_stream, split_parts, split_weights
from mindspeed_llm.data.stream import Sample, SampleStream
from mindspeed_llm.training.folders import Progress
from mindspeed_llm.training.loop import Loop
from mindspeed_llm.training.model import provide
from mindspeed_llm.training.options import TrainOptions
from mindspeed_llm.training.raw_data import token_prefixes
from mindspeed_llm.training.setup import begin, prepare
from mindspeed_llm.training.token_check import check_tokens

Batch = Mapping[str, torch.Tensor]


class BaseTrainer(ABC):
    """Trains a language model; a task gives collate, loss_func and forward_step."""

    handler = "AlpacaStyleInstructionHandler"
    """How records of data files are read where --handler-name does not say."""

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        self.initialize()

    def initialize(self) -> None:
        """Meet the other ranks, open the data, build the model and load its weights."""
        self.setup = prepare(self.options)
        with release_on_error(self.setup.save_dir_lock):
            self.data_path = token_prefixes(self.options, self.handler, self.setup.config_folder)
            self.train_data, self.valid_data = self.open_data()
            self.training = begin(self.setup, self.model_provider)

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> Any:
        """Build the GPTModel of one pipeline stage."""
        setup = self.setup
        build = provide(setup.options, setup.shape, setup.config, setup.vocab_size)
        return build(pre_process, post_process, vp_stage)

    def open_data(self) -> tuple[SampleStream, SampleStream | None]:
        """Open the samples to train on, and those to evaluate on if there are any."""
        first = [InstructionData(prefix) for prefix in split_weights(self.data_path)[1]]
        self.look_at(first)
        self.check_tokens([file for one in first for file in one.token_files])
        train, valid, _ = split_parts(self.options.split)
        return self._open(train), self._open(valid) if self.evaluates(valid) else None

    def check_tokens(self, files: Sequence[TokenFile]) -> None:
        """Refuse tokens that the model does not have."""
        check_tokens(files, self.setup.shape.vocab_size, self.options.cache_dir)

    @abstractmethod
    def look_at(self, data: Sequence[InstructionData]) -> None:
        """Learn from the data sets what batches will be like, before the model is built."""

    def evaluates(self, part: tuple[float, float]) -> bool:
        """Say whether a part of the data is there and asked for."""
        is_asked = bool(self.options.eval_interval and self.options.eval_iters)
        return is_asked and part[1] > part[0]

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """The length and the number of samples of a micro-batch, as Megatron's schedule sees it."""

    @abstractmethod
    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Make the tensors of a micro-batch, in memory of the host; runs on a thread.

        Tensors without dimensions are numbers for the host and stay there.
        """

    def get_batch(self, data_iterator: Iterator[Any]) -> Batch:
        """Take the next micro-batch, as tensors on the device."""
        return on_device(next(data_iterator))

    @abstractmethod
    def loss_func(self, batch: Batch, output_tensor: torch.Tensor) -> Any:
        """Return the loss of a micro-batch, its number of tokens, and what to report."""

    @abstractmethod
    def forward_step(self, data_iterator: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
        """Run the model on the next micro-batch; return its output and the loss function."""

    def train(self) -> Progress:
        """Train to the last step; Stopped is raised if the run is asked to end before."""
        loop = Loop(
            self.setup,
            self.training,
            self.forward_step,
            self.collate,
            train=self.train_data,
            valid=self.valid_data,
            sizes=self.sizes,
        )
        try:
            return loop.run()
        finally:
            if self.setup.save_dir_lock is not None:
                self.setup.save_dir_lock.release()

    def _open(self, part: tuple[float, float]) -> SampleStream:
        options = self.options
        return open_stream(
            self.data_path,
            seed=options.seed,
            shuffle=not options.no_shuffle,
            part=part,
            epoch_multiple=self.setup.dims.global_batch_size if options.padded_samples else 1,
            seq_length=options.seq_length,
        )


def on_device(batch: Batch) -> dict[str, torch.Tensor]:
    """Copy a micro-batch to the device; numbers for the host stay where they are."""
    here = device.current().torch_device
    return {
        name: values.to(here, non_blocking=True) if values.dim() else values
        for name, values in batch.items()
    }
