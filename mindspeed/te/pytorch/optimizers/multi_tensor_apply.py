"""Multi-tensor functions in the calling convention op(chunk_size, overflow_flag, tensor_lists,
*args).

The chunk size means nothing here, and the overflow flag is neither read nor raised: Megatron looks
for non-finite gradients on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TensorLists = list[list[Tensor]]


def multi_tensor_applier(
    op: Callable[..., Any], overflow_flag: Tensor, tensor_lists: TensorLists, *args: Any
) -> Any:
    """Call one of the functions below on lists of tensors."""
    return op(0, overflow_flag, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, overflow_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the norm of all tensors together, (1,), and with per_tensor each one's own, (n,)."""
    norms = l2_norms(tensor_lists[0])
    return torch.linalg.vector_norm(norms).reshape(1), norms if per_tensor else None


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    overflow_flag: Tensor,
    tensor_lists: TensorLists,
    inverse_scale: Tensor,
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the norms the tensors would have after multiplication by inverse_scale."""
    norms = l2_norms(tensor_lists[0]) * inverse_scale.reshape(()).abs()
    return torch.linalg.vector_norm(norms).reshape(1), norms if per_tensor else None


def multi_tensor_scale(
    chunk_size: int, overflow_flag: Tensor, tensor_lists: TensorLists, scale: float
) -> None:
    """Write tensor_lists[0] * scale into tensor_lists[1]."""
    scale_into(tensor_lists[0], tensor_lists[1], scale)


def multi_tensor_scale_tensor(
    chunk_size: int, overflow_flag: Tensor, tensor_lists: TensorLists, scale: Tensor
) -> None:
    """Write tensor_lists[0] * scale into tensor_lists[1], without reading scale on the host."""
    scale_into(tensor_lists[0], tensor_lists[1], scale)


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
