"""Pad groups of rows to the multiple that FP8 GEMMs need, and remove the padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Rows of an FP8 operand come in multiples of 16.
_DEFAULT_ALIGN = 16


class Fp8Padding(nn.Module):
    """Append zero rows to each group until its size is a multiple of `align_size`."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.align_size = align_size or _DEFAULT_ALIGN

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Return the padded rows and the new group sizes."""
        sizes = [_padded(rows, self.align_size) for rows in m_splits]
        groups = x.split(list(m_splits))
        padded = [
            F.pad(group, (0, 0) * (group.dim() - 1) + (0, size - group.shape[0]))
            for group, size in zip(groups, sizes)
        ]
        return torch.cat(padded), sizes


class Fp8Unpadding(nn.Module):
    """Drop the rows that Fp8Padding appended."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.align_size = align_size or _DEFAULT_ALIGN

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> Tensor:
        """Return the rows that belong to groups of the given sizes."""
        sizes = [_padded(rows, self.align_size) for rows in m_splits]
        groups = x.split(sizes)
        return torch.cat([group[:rows] for group, rows in zip(groups, m_splits)])


def _padded(rows: int, align: int) -> int:
    return -(-rows // align) * align
