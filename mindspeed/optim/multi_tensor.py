"""Norms and scalings of many tensors at once."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def l2_norms(tensors: list[Tensor]) -> Tensor:
    """Return the 2-norm of every tensor, (n,), in float32 (float64 for float64 tensors)."""
    if not tensors:
        return torch.zeros(0)
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=wide))


@torch.no_grad()
def scale_into(sources: list[Tensor], targets: list[Tensor], scale: float | Tensor) -> None:
    """Write sources * scale into targets, rounded to their dtype; they may be the same tensors."""
    if not sources:
        return
    if isinstance(scale, Tensor):
        scale = scale.reshape(())
    if all(source is target for source, target in zip(sources, targets)):
        torch._foreach_mul_(targets, scale)
        return
    is_scaled = isinstance(scale, Tensor) or scale != 1.0
    torch._foreach_copy_(targets, torch._foreach_mul(sources, scale) if is_scaled else sources)
