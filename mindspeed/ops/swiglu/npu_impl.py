"""SwiGLU on Ascend, as torch-npu 2.13.0 and 2.14.0 declare it:

npu_swiglu(Tensor self, int dim=-1) -> Tensor
"""

import torch
import torch_npu


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up for x = [gate | up] along the last dimension."""
    return torch_npu.npu_swiglu(x, dim=-1)
