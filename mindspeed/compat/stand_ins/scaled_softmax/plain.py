"""scaled_softmax_cuda: softmax of scores times a scale."""

import torch
from torch import Tensor


def forward(scores: Tensor, scale: Tensor) -> Tensor:
    """Return softmax(scores * scale), computed in fp32."""
    return torch.softmax(scores.float() * scale, -1).to(scores.dtype)


def backward(grad: Tensor, probabilities: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of the scores, of any of the three kernels."""
    grad, weights = grad.float(), probabilities.float()
    weighted = grad * weights
    inner = weighted.sum(-1, keepdim=True)
    return ((weighted - weights * inner) * scale).to(probabilities.dtype)
