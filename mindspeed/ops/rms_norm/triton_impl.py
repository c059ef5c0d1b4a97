"""RMSNorm in Triton, by the kernels that all norms share."""

from __future__ import annotations

from torch import Tensor

from mindspeed.ops.norm.triton_impl import Plan, is_served, normalise
from mindspeed.ops.rms_norm import reference


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Divide x (..., H) by its root mean square over the last dimension, times gamma (H,)."""
    if not is_served(x):
        return reference.rms_norm(x, gamma, epsilon)
    plan = Plan(epsilon, is_rms=True)
    return normalise(plan, x, None, gamma, None, None, None, None)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return rms_norm(x + residual) in the dtype of x, and the sum in the dtype of residual."""
    if not is_served(x):
        return reference.add_rms_norm(x, residual, gamma, epsilon)
    plan = Plan(epsilon, is_rms=True, sum_dtype=residual.dtype)
    return normalise(plan, x, residual, gamma, None, None, None, None)[:2]
