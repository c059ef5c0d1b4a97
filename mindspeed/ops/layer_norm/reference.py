"""LayerNorm in plain torch.

y = (x - mean) / sqrt(var + epsilon) * weight + bias over the last dimension, in float32 at least,
rounded once to the dtype of x.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float = 1e-5) -> Tensor:
    """Normalise x (..., H) over the last dimension, times weight (H,), plus bias (H,)."""
    kept = x
    if any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        # torch keeps its sums in float32, but wants everything in one type.
        wide = torch.promote_types(x.dtype, torch.float32)
        kept, weight = x.to(wide), weight.to(wide)
        bias = None if bias is None else bias.to(wide)
    return functional.layer_norm(kept, weight.shape, weight, bias, epsilon).to(x.dtype)
