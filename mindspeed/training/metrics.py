"""The result of a train step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """What a train step did, the same on every rank."""

    metrics: dict[str, float]
    """Means over the step, the loss first."""
    grad_norm: float
    tokens: int
    """Tokens of the step, without padding."""
    loss_scale: float
    is_updated: bool
    is_finite: bool
    should_stop: bool
    """Whether any rank was asked to stop."""
