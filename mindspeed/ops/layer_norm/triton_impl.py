"""LayerNorm in Triton, by the kernels that all norms share."""

from __future__ import annotations

from torch import Tensor

from mindspeed.ops.layer_norm import reference
from mindspeed.ops.norm.triton_impl import Plan, is_served, normalise


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float = 1e-5) -> Tensor:
    """Normalise x (..., H) over the last dimension, times weight (H,), plus bias (H,)."""
    if not is_served(x):
        return reference.layer_norm(x, weight, bias, epsilon)
    plan = Plan(epsilon, is_rms=False)
    return normalise(plan, x, None, weight, bias, None, None, None)[0]
