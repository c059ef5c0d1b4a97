"""Rotary position embedding on Ascend, as torch-npu 2.13.0 and 2.14.0 declare it:

npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None)
    -> Tensor
"""

import torch
import torch_npu


def rotary_position_embedding(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int = 0
) -> torch.Tensor:
    """Rotate x by tables that broadcast to it; mode 0 pairs the halves, 1 the neighbours."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch_npu.npu_rotary_mul(x, cos, sin, rotary_mode="interleave" if mode else "half")
