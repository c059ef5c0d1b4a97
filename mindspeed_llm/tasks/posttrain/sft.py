"""Supervised fine-tuning: train on the answers of conversations, token by token."""

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed.config import ConfigError
from mindspeed.training.metrics import Metric
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.stream import Sample
from mindspeed_llm.losses.next_token import next_token_loss, next_token_metrics
from mindspeed_llm.tasks.posttrain.base import BaseTrainer, Batch


class SFTTrainer(BaseTrainer):
    """Trains on samples whose labels mark the tokens that are trained."""

    splits_sequences = True
    balances_rows = True
    may_pack = True

    def configure_batches(self, data: Sequence[InstructionData]) -> None:
        """Derive the length of rows, and whether they hold several samples."""
        self.rows = self.make_rows(data)
        if self.options.balance_packs and not self.rows.has_documents:
            raise ConfigError(
                "--balance-packs: rows of one length all have the same attention: add "
                "--variable-seq-lengths, or preprocess with --pack --neat-pack"
            )

    @property
    def sizes(self) -> tuple[int, int]:
        """Packed rows are concatenated to one long row."""
        return self.rows.sizes(self.options.micro_batch_size)

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Pad or concatenate the samples, and count their tokens."""
        return self.rows.collate(samples)

    @property
    def metrics(self) -> Sequence[Metric]:
        """The loss of next tokens."""
        return next_token_metrics(per_token=self.options.calculate_per_token_loss)

    def loss_func(self, batch: Batch, output_tensor: torch.Tensor) -> Any:
        """Sum the losses of the trained tokens; Megatron divides by their number."""
        return next_token_loss(
            output_tensor,
            batch,
            per_token=self.options.calculate_per_token_loss,
            context_ranks=self.setup.dims.cp,
        )
