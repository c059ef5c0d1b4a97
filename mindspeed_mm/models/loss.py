"""The loss of a language model: of every token, by chunks if wanted, then one number."""

from collections.abc import Iterator
from contextlib import contextmanager

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
    """Return what is to be predicted at every position: the label of the next one."""
    return pad(labels[:, 1:], (0, 1), value=IGNORED)


def mean(losses: torch.Tensor, targets: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the loss of a micro-batch from the losses (B, S) of its tokens; 0 if none counts."""
    counts = (targets != IGNORED).sum(1)
    sums = losses.sum(1)
    if kind == "per_sample_loss":
        return (sums / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)
    if kind == "square_loss":
        roots = counts.float().sqrt()
        return (sums / roots.clamp(min=1)).sum() / roots.sum().clamp(min=1)
    return sums.sum() / counts.sum().clamp(min=1)


class LossHead:
    """Lets the output layer of a model return the loss of every token in place of its logits."""

    def __init__(self, head: nn.Module | None, config: LossConfig) -> None:
        if not isinstance(head, nn.Linear):
            raise ConfigError(
                f"compute_mode: {config.compute_mode} needs a plain linear output layer, this "
                f"model has {'none' if head is None else type(head).__name__}: use default"
            )
        self._head, self._config = head, config
        self._plain = head.forward
        self._targets: torch.Tensor | None = None
        # The weight is whole only while the layer itself runs: so the loss is computed in there.
        head.forward = self._forward  # type: ignore[method-assign]

    @contextmanager
    def of(self, targets: torch.Tensor) -> Iterator[None]:
        """Return losses of these targets (B, S) while the context lasts."""
        self._targets = targets
        try:
            yield
        finally:
            self._targets = None

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._targets is None:
            return self._plain(hidden)
        targets, size = self._targets, self._config.chunk
        if self._is_fused(hidden):
            rows = size if self._config.compute_mode == "dynamic_chunk" else size * len(hidden)
            memory = rows * len(self._head.weight) * hidden.element_size()
            return linear_cross_entropy(
                hidden, self._head.weight, targets, ignore_index=IGNORED, memory=memory
            )
        if self._config.compute_mode == "dynamic_chunk":
            hidden, targets = hidden.flatten(0, 1)[None], targets.flatten()[None]
        pieces = [
            self._losses(part, wanted)
            for part, wanted in zip(hidden.split(size, 1), targets.split(size, 1))
        ]
        losses = torch.cat(pieces, 1)
        # Behind a view, FSDP2 could not hook into the backward pass.
        return (
            losses if losses.shape == self._targets.shape else losses.view_as(self._targets).clone()
        )

    def _is_fused(self, hidden: torch.Tensor) -> bool:
        """Return whether there is a kernel here that never has all logits in memory."""
        choice = linear_cross_entropy.choice(hidden.device.type)
        return choice.name != REFERENCE and self._head.bias is None

    def _losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        weight, bias = self._head.weight, self._head.bias
        return checkpoint(_losses, hidden, weight, bias, targets, use_reentrant=False)


def _losses(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    if bias is None:
        return linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORED)
    return cross_entropy(linear(hidden, weight, bias), targets, ignore_index=IGNORED)
