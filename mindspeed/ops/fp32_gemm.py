"""GEMMs of 16-bit matrices whose results are float32, by cuBLAS where torch offers it."""

from __future__ import annotations

import torch
from torch import Tensor

HAS_FP32_RESULTS = "dtype" in torch.ops.aten.mm.overloads()
"""Whether this torch has GEMMs of 16 bits with float32 results (on CUDA only); 2.7 has not."""


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a (M, K) @ b (K, N) in float32; both are converted where there is no other way."""
    if HAS_FP32_RESULTS and a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
