"""KTO: completions that are desirable or not, relative to a frozen reference."""

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from mindspeed.config import ConfigError
from mindspeed.training.metrics import Metric
from mindspeed_llm.data.indexed import IGNORE_INDEX
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.stream import Sample, SampleStream
from mindspeed_llm.losses.log_probs import sequence_log_probs
from mindspeed_llm.losses.next_token import LM_LOSS
from mindspeed_llm.losses.preference import LOG_PROBS, REWARDS, kto_loss
from mindspeed_llm.tasks.posttrain.base import Batch
from mindspeed_llm.tasks.posttrain.reference import REFERENCE, ReferenceTrainer
from mindspeed_llm.training.trainer import Part

logger = logging.getLogger(__name__)

MISMATCHED = "mismatched_"
DIVERGENCE = "divergence"


class KTOTrainer(ReferenceTrainer):
    """Trains a policy on unpaired completions, and keeps it near a reference.

    How far it is from the reference is estimated, once a step, on the prompts of the global batch,
    each with the completion of the sample before it.
    """

    handler = "SharegptStyleKTOHandler"
    data_kind: ClassVar[str] = "kto"
    splits_sequences = True

    def configure_batches(self, data: Sequence[InstructionData]) -> None:
        """Derive the length of rows."""
        if self.setup.dims.global_batch_size < 2:
            raise ConfigError(
                "--global-batch-size 1: KTO pairs each prompt with the completion of another "
                "sample of the step: give 2 or more"
            )
        options = self.options
        check_kinds(data, options.kto_desirable_weight, options.kto_undesirable_weight)
        self.rows = self.make_rows(data)

    def open_part(self, part: Part) -> SampleStream:
        """Open a share of the samples, each with the completion of another."""
        stream = super().open_part(part)
        return MismatchedStream(stream, self.setup.dims.global_batch_size, self.rows.length)

    @property
    def sizes(self) -> tuple[int, int]:
        """A row a sample."""
        return self.rows.length, self.options.micro_batch_size

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Pad or concatenate the samples, and the mismatched ones likewise."""
        others = [
            {"input_ids": each[f"{MISMATCHED}input_ids"], "labels": each[f"{MISMATCHED}labels"]}
            for each in samples
        ]
        own = [{key: each[key] for key in ("input_ids", "labels")} for each in samples]
        mismatched = self.rows.collate(others)
        desirable = torch.tensor([bool(each["desirable"][0]) for each in samples])
        batch = self.rows.collate(own) | {"is_desirable": desirable}
        return batch | {MISMATCHED + name: values for name, values in mismatched.items()}

    def split(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the share of this rank, of the samples and of the mismatched ones."""
        own, others = super().split(batch), super().split(_mismatched(batch))
        return own | {MISMATCHED + name: values for name, values in others.items()}

    def prepare_step(self, batches: list[Batch]) -> list[Batch]:
        """Add the reference's log-probabilities, and how far the policy is from it."""
        others = [_mismatched(batch) for batch in batches]
        reference = self.reference_log_probs(others)
        policy = self.sequence_log_probs(self.primary, others)
        batches = self.with_reference(batches)
        if not policy:
            return batches
        divergence = self._mean(torch.cat(policy) - torch.cat(reference)).clamp(min=0)
        return [{**batch, DIVERGENCE: divergence[None]} for batch in batches]

    @property
    def metrics(self) -> Sequence[Metric]:
        """The loss, the divergence, rewards and log-probabilities; accuracies need pairs."""
        chosen, rejected, margins, _ = REWARDS
        names = (LM_LOSS, "kl", chosen, rejected, *LOG_PROBS)
        return *map(Metric, names), Metric(margins, difference=(chosen, rejected))

    def loss_func(self, batch: Batch, output_tensor: torch.Tensor) -> Any:
        """Sum the losses of completions; Megatron divides by their number."""
        options, is_desirable = self.options, batch["is_desirable"]
        sums, _ = sequence_log_probs(output_tensor, batch, self.context_group)
        ratios, divergence = sums - batch[REFERENCE], batch[DIVERGENCE][0]
        losses = kto_loss(
            ratios,
            is_desirable,
            divergence,
            beta=options.kto_beta,
            desirable_weight=options.kto_desirable_weight,
            undesirable_weight=options.kto_undesirable_weight,
        )
        count = losses.new_tensor(len(losses))
        report = {
            LM_LOSS: torch.stack([losses.detach().sum(), count]),
            "kl": torch.stack([divergence * count, count]),
            "tokens": batch["real_tokens"],
        }
        for number, counted in enumerate((is_desirable, ~is_desirable)):
            weight = counted.float()
            for name, values in ((REWARDS, options.kto_beta * ratios), (LOG_PROBS, sums)):
                total = (values.detach() * weight).sum()
                report[name[number]] = torch.stack([total, weight.sum()])
        return self.sum_of_losses(losses, report)

    def _mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over the micro-batches of all data-parallel ranks."""
        from megatron.core import parallel_state

        total = torch.stack([values.sum(), values.new_tensor(len(values))])
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total[0] / total[1]


class MismatchedStream(SampleStream):
    """Samples, each with its prompt and the completion of the sample before it in the batch.

    The first sample of a batch has the completion of the last; a completion is cut where the two
    are longer than `limit`.
    """

    def __init__(self, stream: SampleStream, batch: int, limit: int) -> None:
        self._stream, self._batch, self._limit = stream, batch, limit
        self.data, self.fingerprint = stream.data, stream.fingerprint

    def locate(self, position: int) -> tuple[int, int]:
        """Return the data set, and the sample in it, at a position."""
        return self._stream.locate(position)

    @property
    def samples_per_epoch(self) -> int:
        """How many positions it takes to see every sample about once."""
        return self._stream.samples_per_epoch

    def __getitem__(self, position: int) -> Sample:
        start = position - position % self._batch
        before = self._stream[start + (position - start - 1) % self._batch]
        sample = self._stream[position]
        prompt, skipped = _prompt_length(sample), _prompt_length(before)
        mismatched = {
            MISMATCHED + key: np.concatenate([sample[key][:prompt], before[key][skipped:]])
            for key in ("input_ids", "labels")
        }
        return {**sample, **{key: values[: self._limit] for key, values in mismatched.items()}}


def check_kinds(
    data: Sequence[InstructionData], desirable_weight: float, undesirable_weight: float
) -> None:
    """Warn if all completions are desirable, or none is; raise if their weight is 0."""
    kinds = set().union(*(one.desirabilities() for one in data))
    if len(kinds) > 1:
        return
    names = ("desirable", "undesirable") if True in kinds else ("undesirable", "desirable")
    if not (desirable_weight if True in kinds else undesirable_weight):
        raise ConfigError(
            f"--kto-{names[0]}-weight 0: all completions of the data are {names[0]}, so nothing "
            f"would be trained: give a weight above 0, or add {names[1]} ones to the data"
        )
    logger.warning(
        "all completions of the data are %s: KTO compares them with %s ones; add such to "
        "the data, or train with another --stage",
        *names,
    )


def _mismatched(batch: Batch) -> dict[str, torch.Tensor]:
    """Return the mismatched samples of a micro-batch, named as its own."""
    return {k.removeprefix(MISMATCHED): v for k, v in batch.items() if k.startswith(MISMATCHED)}


def _prompt_length(sample: Sample) -> int:
    """Return where the completion begins."""
    return int(np.argmax(sample["labels"] != IGNORE_INDEX))
