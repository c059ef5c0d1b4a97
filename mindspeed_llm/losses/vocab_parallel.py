"""Losses, entropy and single tokens of logits whose vocabulary tensor-parallel ranks share."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Group = Any


class _Entropy(Function):
    """The entropy of softmax; every rank has the logits of its part of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Group) -> Tensor:
        logits = logits.float()
        highest = _reduced(logits.amax(-1), group, torch.distributed.ReduceOp.MAX)
        shifted = logits - highest.unsqueeze(-1)
        weights = shifted.exp()
        total = _reduced(weights.sum(-1), group)
        probs = weights / total.unsqueeze(-1)
        # Padding of the vocabulary has probability 0 and a logit that is not finite in a product.
        products = torch.where(probs > 0, probs * shifted, 0.0)
        mean = _reduced(products.sum(-1), group)
        entropy = total.log() - mean
        ctx.save_for_backward(probs, shifted - mean.unsqueeze(-1))
        return entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        probs, distances = ctx.saved_tensors
        found = torch.where(probs > 0, -probs * distances, 0.0)
        return found * gradient.unsqueeze(-1), None


def entropy(logits: Tensor, group: Group = None) -> Tensor:
    """Return the entropy of the next token (b, s) of logits (b, s, part of the vocabulary)."""
    found: Tensor = _Entropy.apply(logits, group)
    return found


def label_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log-probability of labels (b, s); the logits are not usable after it."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    swapped = logits.transpose(0, 1).contiguous(), labels.transpose(0, 1).contiguous()
    found: Tensor = vocab_parallel_cross_entropy(*swapped).transpose(0, 1)
    return found


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


def _reduced(values: Tensor, group: Group, op: Any = torch.distributed.ReduceOp.SUM) -> Tensor:
    if group is not None and torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(values, op, group=group)
    return values
