"""What Megatron calls of `transformer_engine_torch`, under which name this module answers."""

from torch import Tensor

from mindspeed.ops.packed_batch import host_bounds
from mindspeed.parallel.context.layout import partitioned_indices

__all__ = ["thd_get_partitioned_indices"]


def thd_get_partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int
) -> Tensor:
    """Return the rows of packed documents that a context-parallel rank holds (int32).

    Each document is split in zigzag order; its length need not be a multiple of 2 * world_size.
    """
    return partitioned_indices(
        cu_seqlens, total_tokens, world_size, rank, host=host_bounds(cu_seqlens)
    )
