"""Losses over a few tokens of a vocabulary that tensor-parallel ranks share."""

import torch.nn.functional as F
from torch import Tensor


def select_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the logits (rows, len(tokens)) of some tokens from each rank's part (rows, V / tp)."""
    from megatron.core import tensor_parallel
    from megatron.core.parallel_state import get_tensor_model_parallel_rank

    size = logits.shape[-1]
    here = tokens - get_tensor_model_parallel_rank() * size
    is_here = (here >= 0) & (here < size)
    found = logits.index_select(-1, here.clamp(0, size - 1)).float() * is_here
    # The sum over ranks has one summand that is not 0; its gradient is every rank's own.
    return tensor_parallel.reduce_from_tensor_model_parallel_region(found)


def verdict_losses(logits: Tensor, labels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each row of logits, and whether its label is the likeliest token.

    Columns are those of `tokens`, of which every label is one.
    """
    targets = (labels[:, None] == tokens).int().argmax(-1)
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses, logits.argmax(-1) == targets
