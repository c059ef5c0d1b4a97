"""Supervised fine-tuning: train on the answers of conversations, token by token."""

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed.config import ConfigError
from mindspeed.training.metrics import Metric
from mindspeed_llm.data.collate import collate_packed
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.stream import Sample
from mindspeed_llm.losses.next_token import next_token_loss, next_token_metrics
from mindspeed_llm.tasks.posttrain.base import BaseTrainer, Batch
from mindspeed_llm.tasks.posttrain.rows import Rows


class SFTTrainer(BaseTrainer):
    """Trains on samples whose labels mark the tokens that are trained."""

    splits_sequences = True
    balances_rows = True

    def configure_batches(self, data: Sequence[InstructionData]) -> None:
        """Derive the length of rows, and whether they hold several samples."""
        options = self.options
        asked = options.neat_pack or options.reset_position_ids or options.reset_attention_mask
        self.is_packed = asked or any(one.is_neat for one in data)
        if self.is_packed and options.transformer_impl == "local":
            raise ConfigError("packed samples need --transformer-impl transformer_engine")
        if self.is_packed and options.variable_seq_lengths:
            raise ConfigError("packed rows all have one length: drop --variable-seq-lengths")
        self.rows = Rows.of(options, self.setup.shape, data, is_packed=self.is_packed)
        if self.is_packed or self.rows.kind == "concatenated":
            self.expect_documents()
        elif options.balance_packs:
            raise ConfigError(
                "--balance-packs: rows of one length all have the same attention: add "
                "--variable-seq-lengths, or preprocess with --pack --neat-pack"
            )

    @property
    def sizes(self) -> tuple[int, int]:
        """Packed rows are concatenated to one long row."""
        size, length = self.options.micro_batch_size, self.rows.length
        return (length * size, 1) if self.is_packed else (length, size)

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Pad or concatenate the samples, and count their tokens."""
        if not self.is_packed:
            return self.rows.collate(samples)
        real = sum(int((sample["attention_mask"] != 0).sum()) for sample in samples)
        return collate_packed(samples) | {"real_tokens": torch.tensor(real)}

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
