"""Log-probabilities of sequences, from the losses of their tokens.

The loss of a label is its negative log-probability, computed on a vocabulary that tensor-parallel
ranks share, so that no rank holds all logits, and by a fused kernel no rank holds its part of them.
"""

from collections.abc import Mapping
from typing import Any

import torch

from mindspeed.distributed.collectives import all_reduce

Batch = Mapping[str, torch.Tensor]


def token_log_probs(losses: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the log-probability of every label in the loss mask, 0 elsewhere, in float32."""
    mask = batch["loss_mask"]
    return (-losses.float()).masked_fill(mask == 0, 0.0)


def sequence_sums(values: torch.Tensor, batch: Batch, context_group: Any = None) -> torch.Tensor:
    """Sum the values of tokens over each sequence of a micro-batch.

    A sequence is a row, or with `cu_seqlens` what lies between two boundaries of the only row; the
    first `num_sequences` of these are sequences, and the rest is padding. The ranks of
    `context_group` hold parts of each sequence, of `local_lengths` rows; all of them get the whole
    sum, and each goes on with the same gradient, of which it takes the part of its own tokens.
    """
    return all_reduce(_local_sums(values, batch), context_group)


def _local_sums(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    if "cu_seqlens" not in batch:
        return values.sum(-1)
    lengths = batch.get("local_lengths")
    if lengths is None:
        lengths = batch["cu_seqlens"].diff().to(torch.int64)
    # A sum in a fixed order; index_add_ of a GPU adds in any.
    sums = torch.segment_reduce(values.flatten(), "sum", lengths=lengths, unsafe=True)
    return sums[: int(batch["num_sequences"])]


def sequence_log_probs(
    losses: torch.Tensor, batch: Batch, context_group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed log-probability of every sequence, and its number of labels."""
    sums = sequence_sums(token_log_probs(losses, batch), batch, context_group)
    return sums, sequence_sums(batch["loss_mask"], batch, context_group)
