"""SwiGLU on Ascend, as torch-npu 2.13.0 and 2.14.0 declare it:

npu_swiglu(Tensor self, int dim=-1) -> Tensor
"""

from __future__ import annotations

import torch_npu
from torch import Tensor


def swiglu(
    x: Tensor, dim: int = -1, *, bias: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return silu(gate) * up for x = [gate | up] along `dim`."""
    y = torch_npu.npu_swiglu(x if bias is None else x + bias, dim=dim)
    return y if weights is None else (y * weights).to(x.dtype)
