"""Split a tensor along a dimension, under the name Megatron imports."""

from __future__ import annotations

import torch
from torch import Tensor


class _SplitAlongDim:
    @staticmethod
    def apply(
        mixed: Tensor, split_dim: int, split_sizes: int | list[int], squeeze: bool = False
    ) -> tuple[Tensor, ...]:
        parts = torch.split(mixed, split_sizes, dim=split_dim)
        return tuple(part.squeeze(split_dim) for part in parts) if squeeze else parts
