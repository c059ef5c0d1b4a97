"""RMSNorm on Ascend, as torch-npu 2.13.0 and 2.14.0 declare it:

npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)
npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06)
    -> (Tensor, Tensor, Tensor)
"""

import torch
import torch_npu


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    """Divide x (..., H) by its root mean square over the last dimension, times gamma (H,)."""
    # The kernel takes gamma in the dtype of x; its second output is for its own backward.
    return torch_npu.npu_rms_norm(x, gamma.to(x.dtype), epsilon=epsilon)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rms_norm(x + residual) in the dtype of x, and the sum in the dtype of residual."""
    if residual.dtype != x.dtype or torch.is_grad_enabled():
        # The fused kernel takes one dtype and has no backward.
        total = (x + residual).to(residual.dtype)
        return rms_norm(total, gamma, epsilon).to(x.dtype), total
    out, _, total = torch_npu.npu_add_rms_norm(x, residual, gamma.to(x.dtype), epsilon=epsilon)
    return out, total
