"""Collectives along dim 0 of a tensor. Without a group, or in a group of one, they do nothing."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def group_size(group: ProcessGroup | None) -> int:
    """Count the ranks of a group; no group is a group of one."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """Return this process's rank in a group; no group is a group of one."""
    return 0 if group is None else group.rank()


def all_gather(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Stack the equal pieces of all ranks: (S / n, ...) -> (S, ...)."""
    size = group_size(group)
    if size == 1:
        return x
    gathered = x.new_empty((x.shape[0] * size, *x.shape[1:]))
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def reduce_scatter(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over ranks and keep this rank's piece: (S, ...) -> (S / n, ...)."""
    size = group_size(group)
    if size == 1:
        return x
    if x.shape[0] % size:
        raise ValueError(
            f"sequence length {x.shape[0]} does not split over {size} tensor-parallel ranks: "
            f"pad it to a multiple of {size} or turn sequence_parallel off"
        )
    piece = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    dist.reduce_scatter_tensor(piece, x.contiguous(), group=group)
    return piece


def all_reduce(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over ranks into a new tensor."""
    if group_size(group) == 1:
        return x
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
