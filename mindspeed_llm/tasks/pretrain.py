"""Pretraining: train on every token of plain documents."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from mindspeed.config import ConfigError
from mindspeed.training.metrics import Metric
from mindspeed_llm.data.collate import collate_fixed, collate_packed
from mindspeed_llm.data.handlers import PRETRAIN
from mindspeed_llm.data.instruction import split_weights
from mindspeed_llm.data.stream import Sample, SampleStream
from mindspeed_llm.losses.next_token import next_token_loss, next_token_metrics
from mindspeed_llm.training.documents import (
    document_facts,
    document_tokens,
    ends_with_stop_token,
    open_documents,
)
from mindspeed_llm.training.joined_samples import why_not_joined
from mindspeed_llm.training.trainer import Batch, Part, Trainer

logger = logging.getLogger(__name__)


class PretrainTrainer(Trainer):
    """Trains on windows of --seq-length tokens over documents."""

    handler = PRETRAIN
    splits_sequences = True
    balances_rows = True

    def configure_from_data(self) -> None:
        """Check the token files against the model."""
        if self.options.seq_length is None:
            raise ConfigError("--seq-length is missing: the length of the samples")
        self.length: int = self.options.seq_length
        self.is_separate = self.options.reset_attention_mask or self.options.reset_position_ids
        prefixes = split_weights(self.data_path)[1]
        if self.is_separate:
            self._check_separate(prefixes)
            self.expect_documents()
        elif self.options.balance_packs:
            raise ConfigError(
                "--balance-packs: rows of one length all have the same attention: add "
                "--reset-attention-mask"
            )
        self.check_vocabulary({prefix: document_facts(prefix) for prefix in prefixes})
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
            separate=self.is_separate,
            balanced_step=self.balanced_step,
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows are windows; those of separate documents are concatenated to one long row."""
        size = self.options.micro_batch_size
        return (self.length * size, 1) if self.is_separate else (self.length, size)

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Stack windows, whose labels are the tokens that follow, and count their tokens."""
        if self.is_separate:
            batch = collate_packed(samples, shift=False)
        else:
            batch = collate_fixed(samples, seq_length=self.length, pad_id=0, shift=False)
        real = sum(len(sample["input_ids"]) for sample in samples)
        return batch | {"real_tokens": torch.tensor(real)}

    def _check_separate(self, prefixes: Sequence[str]) -> None:
        reason = why_not_joined(self.options, self.setup.shape)
        if reason is not None:
            raise ConfigError(f"--reset-attention-mask: {reason}")
        for prefix in prefixes:
            if not ends_with_stop_token(prefix):
                logger.warning(
                    "%s: documents do not end with the end-of-text token, so its end is never "
                    "trained: preprocess with --append-eod",
                    prefix,
                )

    @property
    def metrics(self) -> Sequence[Metric]:
        """The loss of next tokens."""
        return next_token_metrics(per_token=self.options.calculate_per_token_loss)

    def loss_func(self, batch: Batch, output_tensor: torch.Tensor) -> Any:
        """Sum the losses of all tokens; Megatron divides by their number."""
        return next_token_loss(
            output_tensor,
            batch,
            per_token=self.options.calculate_per_token_loss,
            context_ranks=self.setup.dims.cp,
        )
