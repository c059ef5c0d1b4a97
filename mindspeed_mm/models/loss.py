"""The loss of a language model: per token, optionally by chunks, then reduced to a scalar."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, pad
from torch.utils.checkpoint import checkpoint

from mindspeed.config import ConfigError
from mindspeed.ops.cross_entropy import cross_entropy
from mindspeed.ops.dispatch import REFERENCE
from mindspeed.ops.linear_cross_entropy import linear_cross_entropy
from mindspeed_mm.models.options import LossConfig

IGNORED = -100


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return the target of every position: the label of the next one."""
    return pad(labels[:, 1:], (0, 1), value=IGNORED)


def reduce_loss(losses: torch.Tensor, targets: torch.Tensor, loss_type: str) -> torch.Tensor:
    """Return the loss of a micro-batch from the token losses (B, S); 0 without targets."""
    counts = (targets != IGNORED).sum(1)
    sums = losses.sum(1)
    if loss_type == "per_sample_loss":
        return (sums / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)
    if loss_type == "square_loss":
        roots = counts.float().sqrt()
        return (sums / roots.clamp(min=1)).sum() / roots.sum().clamp(min=1)
    return sums.sum() / counts.sum().clamp(min=1)


class LossHead:
    """Makes the output layer of a model return token losses instead of logits."""

    def __init__(self, head: nn.Module | None, config: LossConfig) -> None:
        if not isinstance(head, nn.Linear):
            raise ConfigError(
                f"compute_mode: {config.compute_mode} needs a plain linear output layer, this "
                f"model has {'none' if head is None else type(head).__name__}: use default"
            )
        self._head, self._config = head, config
        self._forward = head.forward
        self._targets: torch.Tensor | None = None
        self._made: torch.Tensor | None = None
        # FSDP2 gathers the weight only while the layer itself runs: the loss is computed there.
        head.forward = self._losses_or_logits  # type: ignore[method-assign, assignment]

    @contextmanager
    def losses_of(self, targets: torch.Tensor) -> Iterator[None]:
        """Return the losses of these targets (B, S) within the context."""
        self._targets = targets
        try:
            yield
        finally:
            self._targets = self._made = None

    def check(self, returned: torch.Tensor, model: nn.Module) -> None:
        """Reject a model that changes what its output layer returns: those were no logits."""
        if self._made is None or not _is_same(returned, self._made):
            raise ConfigError(
                f"compute_mode: {self._config.compute_mode} needs the logits as the output layer "
                f"computes them, {type(model).__name__} changes them (a scale, a cap, masked "
                "tokens): use default"
            )

    def _losses_or_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._targets is None:
            return self._forward(hidden)
        self._made = self._token_losses(hidden, self._targets)
        return self._made

    def _token_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        shape, size = targets.shape, self._config.chunk
        if self._is_fused(hidden):
            rows = size if self._config.compute_mode == "dynamic_chunk" else size * len(hidden)
            memory = rows * len(self._head.weight) * hidden.element_size()
            return linear_cross_entropy(
                hidden, self._head.weight, targets, ignore_index=IGNORED, memory=memory
            )
        if self._config.compute_mode == "dynamic_chunk":
            hidden, targets = hidden.flatten(0, 1)[None], targets.flatten()[None]
        chunks = [
            self._losses(part, chunk)
            for part, chunk in zip(hidden.split(size, 1), targets.split(size, 1))
        ]
        losses = torch.cat(chunks, 1)
        # Behind a view, FSDP2 could not hook into the backward pass.
        return losses if losses.shape == shape else losses.view(shape).clone()

    def _is_fused(self, hidden: torch.Tensor) -> bool:
        """Return whether a kernel is available that never materializes all logits."""
        choice = linear_cross_entropy.choice(hidden.device.type)
        return choice.name != REFERENCE and self._head.bias is None

    def _losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        weight, bias = self._head.weight, self._head.bias
        return checkpoint(_losses, hidden, weight, bias, targets, use_reentrant=False)


def _is_same(returned: torch.Tensor, made: torch.Tensor) -> bool:
    """Return whether a tensor is another one, or a cast of it; without waiting for the device."""
    if returned.dtype == made.dtype and returned.grad_fn is None:
        return returned is made
    return returned.shape == made.shape and _uncast(returned) is _uncast(made)


def _uncast(tensor: torch.Tensor) -> Any:
    """Return what computed a tensor before it was cast."""
    node = tensor.grad_fn
    while node is not None and node.name() == "ToCopyBackward0":
        node = node.next_functions[0][0]
    return node


def _losses(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    if bias is None:
        return linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORED)
    return cross_entropy(linear(hidden, weight, bias), targets, ignore_index=IGNORED)
