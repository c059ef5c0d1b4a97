"""What stages on pairs share: a chosen and a rejected completion of every prompt."""

import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from mindspeed.training.metrics import Metric
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.stream import Sample
from mindspeed_llm.losses.log_probs import sequence_log_probs
from mindspeed_llm.losses.next_token import LM_LOSS
from mindspeed_llm.losses.preference import (
    LOG_PROBS,
    REWARDS,
    Pairs,
    completion_loss,
    report_log_probs,
    report_rewards,
    sum_and_count,
)
from mindspeed_llm.tasks.posttrain.base import BaseTrainer, Batch
from mindspeed_llm.training.shared_prompts import shares_prompts, why_not_shared

logger = logging.getLogger(__name__)

COMPLETION_LOSS = "sft loss"


class PairwiseTrainer(BaseTrainer):
    """Trains on pairs; a micro-batch of n pairs has the n chosen, then the n rejected sequences."""

    handler = "AlpacaStylePairwiseHandler"
    data_kind: ClassVar[str] = "pairwise"
    splits_sequences = True

    def configure_batches(self, data: Sequence[InstructionData]) -> None:
        """Derive the length of rows, and whether they hold prompts once."""
        self.rows, options, shape = self.make_rows(data), self.options, self.setup.shape
        self.shares_prompts = shares_prompts(options, shape)
        if self.shares_prompts:
            logger.info("the common prompt of a pair is computed once (--no-share-prompts: twice)")
        elif not options.no_share_prompts:
            reason = why_not_shared(options, shape)
            logger.info("the common prompt of a pair is computed twice: %s needs it", reason)

    @property
    def sizes(self) -> tuple[int, int]:
        """Two rows a pair."""
        return self.rows.length, 2 * self.options.micro_batch_size

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Pad or concatenate the sequences of pairs, or concatenate them with each prompt once."""
        return self.rows.collate_pairs(samples, is_shared=self.shares_prompts)


class LogProbTrainer(PairwiseTrainer):
    """Trains on the log-probabilities of completions; a stage makes losses and rewards of them."""

    is_mean: ClassVar[bool] = False
    """Whether the log-probability of a completion is the mean, not the sum, over its tokens."""

    @abstractmethod
    def pair_losses(self, batch: Batch, log_probs: Pairs, counts: Pairs) -> tuple[Any, Pairs]:
        """Return the loss and the rewards of every pair, given the tokens of completions."""

    @property
    def metrics(self) -> Sequence[Metric]:
        """The loss, rewards and log-probabilities."""
        more = (COMPLETION_LOSS,) if self.options.pref_ftx else ()
        return tuple(Metric(name) for name in (LM_LOSS, *REWARDS, *LOG_PROBS, *more))

    def loss_func(self, batch: Batch, output_tensor: torch.Tensor) -> Any:
        """Sum the losses of pairs; Megatron divides by their number."""
        sums, counts = map(Pairs.of, sequence_log_probs(output_tensor, batch, self.context_group))
        losses, rewards = self.pair_losses(batch, sums, counts)
        shown = sums.map(torch.div, counts) if self.is_mean else sums
        report = report_rewards(rewards) | report_log_probs(shown)
        if self.options.pref_ftx:
            completions = completion_loss(sums, counts)
            report[COMPLETION_LOSS] = sum_and_count(completions)
            losses = losses + self.options.pref_ftx * completions
        report |= {LM_LOSS: sum_and_count(losses), "tokens": batch["real_tokens"]}
        return self.sum_of_losses(losses, report)
