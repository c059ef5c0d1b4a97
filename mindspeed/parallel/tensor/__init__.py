"""Tensor-parallel algorithms: collectives along dim 0, their gradients, the sharded linear."""

from mindspeed.parallel.tensor.collectives import (
    all_gather,
    all_reduce,
    group_rank,
    group_size,
    reduce_scatter,
)
from mindspeed.parallel.tensor.gated_linear import gated_linear
from mindspeed.parallel.tensor.grouped_linear import grouped_linear
from mindspeed.parallel.tensor.linear import DeferredGradients, dummy_gradient, linear
from mindspeed.parallel.tensor.low_rank_linear import low_rank_gated_linear, low_rank_linear
from mindspeed.parallel.tensor.mappings import (
    copy_to_ranks,
    gather_sequence,
    reduce_partial,
    reduce_scatter_sequence,
)

__all__ = [
    "DeferredGradients",
    "all_gather",
    "all_reduce",
    "copy_to_ranks",
    "dummy_gradient",
    "gated_linear",
    "gather_sequence",
    "group_rank",
    "group_size",
    "grouped_linear",
    "linear",
    "low_rank_gated_linear",
    "low_rank_linear",
    "reduce_partial",
    "reduce_scatter",
    "reduce_scatter_sequence",
]
