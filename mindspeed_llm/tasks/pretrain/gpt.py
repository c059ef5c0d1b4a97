"""Pretraining: train on every token of plain documents."""

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed.config import ConfigError
from mindspeed.training.metrics import Metric
from mindspeed_llm.data.collate import collate_fixed
from mindspeed_llm.data.handlers import PRETRAIN
from mindspeed_llm.data.instruction import split_weights
from mindspeed_llm.data.stream import Sample, SampleStream
from mindspeed_llm.losses.next_token import next_token_loss, next_token_metrics
from mindspeed_llm.training.documents import document_facts, document_tokens, open_documents
from mindspeed_llm.training.trainer import Batch, Part, Trainer


class PretrainTrainer(Trainer):
    """Trains on windows of --seq-length tokens over documents."""

    handler = PRETRAIN

    def configure_from_data(self) -> None:
        """Check the token files against the model."""
        if self.options.seq_length is None:
            raise ConfigError("--seq-length is missing: the length of the samples")
        self.length: int = self.options.seq_length
        prefixes = split_weights(self.data_path)[1]
        for prefix in prefixes:
            self.check_vocabulary(prefix, document_facts(prefix))
        self.check_tokens([document_tokens(prefix) for prefix in prefixes])

    def open_part(self, part: Part) -> SampleStream:
        """Open a share of the windows."""
        options = self.options
        return open_documents(
            self.data_path,
            self.length,
            seed=options.seed,
            shuffle=not options.no_shuffle,
            part=part,
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows are windows."""
        return self.length, self.options.micro_batch_size

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Stack windows, whose labels are the tokens that follow, and count their tokens."""
        batch = collate_fixed(samples, seq_length=self.length, pad_id=0, shift=False)
        real = sum(len(sample["input_ids"]) for sample in samples)
        return batch | {"real_tokens": torch.tensor(real)}

    @property
    def metrics(self) -> Sequence[Metric]:
        """The loss of next tokens."""
        return next_token_metrics(per_token=self.options.calculate_per_token_loss)

    def loss_func(self, batch: Batch, output_tensor: torch.Tensor) -> Any:
        """Sum the losses of all tokens; Megatron divides by their number."""
        per_token = self.options.calculate_per_token_loss
        return next_token_loss(output_tensor, batch, per_token=per_token)
