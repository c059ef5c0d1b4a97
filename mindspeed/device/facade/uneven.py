"""Shards of different sizes in all-gathers and reduce-scatters of lists.

NCCL takes them, and Megatron's all-to-all dispatcher uses that for experts that are split over
tensor-parallel ranks. Gloo refuses them: the lists travel padded to the longest shard, of which
every rank knows the size from its list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Pairs = list[tuple[Tensor, Tensor]]


def padded_arguments(name: str, args: tuple[Any, ...], pairs: Pairs) -> tuple[Any, ...]:
    """Return the arguments of allgather or reduce_scatter with shards of one size.

    The outputs and what gloo writes in their place are added to `pairs`.
    """
    if name not in ("allgather", "reduce_scatter") or len(args) < 2:
        return args
    lists = args[0] if name == "allgather" else args[1]
    if not all(isinstance(each, (list, tuple)) for each in lists):
        return args
    sizes = {shard.numel() for each in lists for shard in each}
    if len(sizes) < 2:
        return args
    longest = max(sizes)
    if name == "allgather":
        gathered = [[_output(shard, longest, pairs) for shard in each] for each in lists]
        return (gathered, [_padded(shard, longest) for shard in args[1]], *args[2:])
    scattered = [_output(shard, longest, pairs) for shard in args[0]]
    return (scattered, [[_padded(shard, longest) for shard in each] for each in lists], *args[2:])


def _output(shard: Tensor, longest: int, pairs: Pairs) -> Tensor:
    buffer = shard.new_empty(longest)
    pairs.append((shard, buffer[: shard.numel()].view(shard.shape)))
    return buffer


def _padded(shard: Tensor, longest: int) -> Tensor:
    flat = shard.detach().reshape(-1)
    return torch.nn.functional.pad(flat, (0, longest - flat.numel()))
