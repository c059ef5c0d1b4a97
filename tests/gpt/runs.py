"""Whole trainings, each layout trained once in a test session, and how two of them compare."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.budget import steps
from tests.gpt.layout import Layout
from tests.gpt.weights import Shard, assemble
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from tests.gpt.training import Training

STEPS = steps(6, deep=10)
_TIMEOUT = 240  # seconds; a run takes one to four on an idle machine


@dataclass(frozen=True)
class Trained:
    """What the steps of a layout gave."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]
    fingerprints: list[list[str]]
    """For each rank, what its parameters hashed to after each step."""

    @property
    def falls(self) -> bool:
        """Whether it learns: the loss falls by 2 % of the first one a step."""
        return self.losses[-1] < (1 - 0.02 * STEPS) * self.losses[0]


def in_ranks(layout: Layout, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call function(training, *arguments) in every rank of a layout; return their values."""
    return run_ranks(_with_training, layout.world, layout, function, arguments, timeout=_TIMEOUT)


@functools.cache
def trained(layout: Layout) -> Trained:
    """Train a layout, unless this session has done so already."""
    ranks = in_ranks(layout, _train)
    losses = [rank[0] for rank in ranks if None not in rank[0]]
    return Trained(
        losses=[sum(step) / len(step) for step in zip(*losses)],
        grad_norms=ranks[0][1],
        fingerprints=[rank[2] for rank in ranks],
        weights=assemble(shard for rank in ranks for shard in rank[3]),
    )


def assert_same_training(layout: Layout, *, bitwise: bool = False) -> None:
    """Check a layout's losses, gradient norms and weights against the plain run on one rank.

    Not bitwise where sums are taken in another order; ten steps then leave 1e-7 in the loss and
    4e-7 in weights that have moved by up to 1e-2.
    """
    run, plain = trained(layout), trained(layout.plain())
    assert plain.falls
    assert run.losses == pytest.approx(plain.losses, rel=0 if bitwise else 1e-6)
    assert run.grad_norms == pytest.approx(plain.grad_norms, rel=1e-5)
    assert_same_weights(run.weights, plain.weights, atol=0 if bitwise else 1e-6)


def assert_same_weights(
    weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, atol: float = 0
) -> None:
    """Check weights by global name."""
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=atol, msg=name)


def _with_training(layout: Layout, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    from tests.gpt.training import Training  # Megatron stays out of the process that runs pytest

    return function(Training(layout), *arguments)


def _train(training: "Training") -> tuple[list[float | None], list[float], list[str], list[Shard]]:
    losses, norms, fingerprints = [], [], []
    for _ in range(STEPS):
        loss, norm = training.step()
        losses.append(loss)
        norms.append(norm)
        fingerprints.append(_fingerprint(training))
    return losses, norms, fingerprints, training.weights()


def _fingerprint(training: "Training") -> str:
    digest = hashlib.sha256()
    for chunk in training.chunks:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
