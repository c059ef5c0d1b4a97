"""DPO: preferences by log-probabilities relative to a frozen reference."""

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch

from mindspeed import device
from mindspeed.config import ConfigError
from mindspeed.training.checkpoint_dir import TrainState
from mindspeed_llm.data.indexed import Array
from mindspeed_llm.data.instruction import InstructionData, Numbered
from mindspeed_llm.data.stream import MicroBatches, Sample, SampleStream
from mindspeed_llm.losses.preference import Pairs, dpo_loss
from mindspeed_llm.tasks.posttrain.base import Batch
from mindspeed_llm.tasks.posttrain.pairwise import LogProbTrainer
from mindspeed_llm.tasks.posttrain.precomputed import read_table, table_path, write_table
from mindspeed_llm.tasks.posttrain.reference import REFERENCE, ReferenceTrainer
from mindspeed_llm.training.model import ModelRole
from mindspeed_llm.training.trainer import Part

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 60.0
"""How often the pass of the reference over all pairs logs where it is."""


class DPOTrainer(LogProbTrainer, ReferenceTrainer):
    """Trains a policy on pairs, and keeps it near a reference."""

    table: Array | None = None
    """The reference's log-probabilities of all pairs (pairs, 2), where they are precomputed."""

    @property
    def models(self) -> tuple[ModelRole, ...]:
        """The policy, and the reference unless all that it says is known."""
        roles = super().models
        return roles if self.table is None else roles[:1]

    def configure_batches(self, data: Sequence[InstructionData]) -> None:
        """Derive the length of rows, and read what was precomputed."""
        super().configure_batches(data)
        if not self.options.precompute_ref_log_probs:
            return
        if self.options.from_scratch:
            raise ConfigError("--precompute-ref-log-probs: random weights are no reference")
        self._data = data
        self._table_path = table_path(self.options, self.setup.shape, data)
        self.table = read_table(self._table_path, (sum(map(len, data)), 2))

    def open_part(self, part: Part) -> SampleStream:
        """Open a share of the pairs."""
        return self.open_samples(part, is_numbered=self.options.precompute_ref_log_probs)

    def train(self) -> TrainState:
        """Train to the last step; Stopped is raised if the run is asked to stop before."""
        if self.options.precompute_ref_log_probs and self.table is None:
            table = self._precompute()
            write_table(self._table_path, table)
            self.table = table
            self.training.models.pop("reference", None)
        return super().train()

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Pad or concatenate the sequences of pairs, with what is known of the reference."""
        batch = super().collate(samples)
        if self.table is not None:
            known = self.table[[int(sample["number"]) for sample in samples]]
            batch[REFERENCE] = torch.from_numpy(known.T.flatten())
        return batch

    def prepare_step(self, batches: list[Batch]) -> list[Batch]:
        """Add the reference's log-probabilities, unless they were precomputed."""
        return batches if self.table is not None else self.with_reference(batches)

    def pair_losses(
        self, batch: Batch, log_probs: Pairs, counts: Pairs
    ) -> tuple[torch.Tensor, Pairs]:
        """Return the loss and the rewards of every pair."""
        options = self.options
        ratios = log_probs.map(torch.sub, Pairs.of(batch[REFERENCE]))
        losses = dpo_loss(
            ratios,
            counts,
            beta=options.dpo_beta,
            kind=options.dpo_loss_type,
            label_smoothing=options.dpo_label_smoothing,
        )
        return losses, ratios.map(lambda ratio: options.dpo_beta * ratio)

    def _precompute(self) -> Array:
        """Return the reference's log-probabilities of all pairs."""
        count, size = sum(map(len, self._data)), self.setup.dims.global_batch_size
        table = torch.full((count, 2), -torch.inf, device=device.current().torch_device)
        logger.info("the reference computes the log-probabilities of %d pairs, once", count)
        logged = time.monotonic()
        for number, step in enumerate(self._steps_in_order(), 1):
            found = self.reference_log_probs([self.split(self.collate(few)) for few in step])
            for samples, values in zip(step, found):
                table[[int(sample["number"]) for sample in samples]] = torch.stack(
                    [*Pairs.of(values)], 1
                )
            if time.monotonic() > logged + PROGRESS_SECONDS:
                logged = time.monotonic()
                logger.info("%d of %d pairs", min(number * size, count), count)
        # Pairs that another rank computed are -inf here.
        torch.distributed.all_reduce(table, torch.distributed.ReduceOp.MAX)
        if not table.isfinite().all():
            number = int((~table.isfinite()).any(1).nonzero()[0])
            raise ConfigError(f"the reference's log-probability of pair {number} is not finite")
        return np.asarray(table.cpu())

    def _steps_in_order(self) -> Iterator[list[list[Sample]]]:
        """Yield this rank's micro-batches of all data sets, as many at once as a step has."""
        dims, start = self.setup.dims, 0
        for data in self._data:
            stream = SampleStream([Numbered(data, start)], shuffle=False)
            batches = MicroBatches(
                stream, size=self.options.micro_batch_size, rank=dims.dp_rank, world=dims.dp
            )
            for _ in range(-(-len(data) // dims.global_batch_size)):
                yield list(islice(batches, dims.num_micro_batches))
            start += len(data)
