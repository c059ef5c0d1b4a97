"""scaled_upper_triang_masked_softmax_cuda: softmax of scaled scores up to the diagonal."""

import torch
from torch import Tensor

from mindspeed.compat.stand_ins.scaled_softmax.plain import backward

__all__ = ["backward", "forward"]


def forward(scores: Tensor, scale: Tensor) -> Tensor:
    """Return softmax(scores * scale) of each query over the keys that are not behind it."""
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    scaled = (scores.float() * scale).masked_fill(hidden, -torch.inf)
    return torch.softmax(scaled, -1).to(scores.dtype)
