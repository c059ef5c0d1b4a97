"""Supervised fine-tuning: train on the answers of conversations, token by token."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from mindspeed.config import ConfigError
from mindspeed.training.metrics import Metric
from mindspeed_llm.data.collate import collate_fixed, collate_packed, collate_variable
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.stream import Sample
from mindspeed_llm.losses.next_token import next_token_loss, next_token_metrics
from mindspeed_llm.tasks.posttrain.base import BaseTrainer, Batch


class SFTTrainer(BaseTrainer):
    """Trains on samples whose labels mark the tokens that are trained."""

    def configure_batches(self, data: Sequence[InstructionData]) -> None:
        """Derive the length of rows, their padding, and whether they hold several samples."""
        options, tp = self.options, self.setup.dims.tp
        self.pad_id: int = next((one.facts.get("pad_id", 0) for one in data), 0)
        asked = options.neat_pack or options.reset_position_ids or options.reset_attention_mask
        self.is_packed = asked or any(_is_neat(one) for one in data)
        if self.is_packed and options.transformer_impl == "local":
            raise ConfigError("packed samples need --transformer-impl transformer_engine")
        if self.is_packed and options.variable_seq_lengths:
            raise ConfigError("packed rows all have one length: drop --variable-seq-lengths")
        # Multi-token prediction and Megatron's local layers take rows of one sample only.
        is_one_sample = self.setup.shape.mtp_num_layers or options.transformer_impl == "local"
        self.is_concatenated = options.variable_seq_lengths and not is_one_sample
        # With sequence parallelism every rank takes an equal share of the positions.
        self.multiple = math.lcm(options.pad_to_multiple_of, tp)
        longest = max(one.longest for one in data)
        length = options.seq_length or -(-longest // self.multiple) * self.multiple
        if self.is_packed:
            length = longest
        if options.sequence_parallel and length % tp:
            raise ConfigError(
                f"--sequence-parallel: a length of {length} cannot be shared by {tp} ranks: choose "
                "--seq-length a multiple of it"
            )
        self.length = length

    @property
    def sizes(self) -> tuple[int, int]:
        """Packed rows are concatenated to one long row."""
        size = self.options.micro_batch_size
        return (self.length * size, 1) if self.is_packed else (self.length, size)

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Pad or concatenate the samples, and count their tokens."""
        if self.is_packed:
            batch = collate_packed(samples)
            real = sum(int((sample["attention_mask"] != 0).sum()) for sample in samples)
        else:
            batch = self._concatenated(samples) if self.is_concatenated else self._padded(samples)
            real = sum(len(sample["input_ids"]) for sample in samples)
        return batch | {"real_tokens": torch.tensor(real)}

    @property
    def metrics(self) -> Sequence[Metric]:
        """The loss of next tokens."""
        return next_token_metrics(per_token=self.options.calculate_per_token_loss)

    def loss_func(self, batch: Batch, output_tensor: torch.Tensor) -> Any:
        """Sum the losses of the trained tokens; Megatron divides by their number."""
        per_token = self.options.calculate_per_token_loss
        return next_token_loss(output_tensor, batch, per_token=per_token)

    def _concatenated(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        return collate_packed(samples, multiple=self.multiple, pad_id=self.pad_id)

    def _padded(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        if not self.options.variable_seq_lengths:
            return collate_fixed(samples, seq_length=self.length, pad_id=self.pad_id)
        return collate_variable(samples, multiple=self.multiple, pad_id=self.pad_id)


def _is_neat(data: InstructionData) -> bool:
    """Return whether rows hold several samples; the mask of such a row numbers them."""
    packing = data.facts.get("pack")
    if data.facts:
        return bool(packing == "neat")
    return len(data) > 0 and bool(data[0]["attention_mask"].max() > 1)
