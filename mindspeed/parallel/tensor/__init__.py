"""Tensor-parallel algorithms: collectives along dim 0, their gradients, the sharded linear."""

from mindspeed.parallel.tensor.collectives import (
    all_gather,
    all_reduce,
    group_rank,
    group_size,
    reduce_scatter,
)
from mindspeed.parallel.tensor.grouped_linear import grouped_linear
from mindspeed.parallel.tensor.linear import DeferredGradients, dummy_gradient, linear
from mindspeed.parallel.tensor.low_rank_linear import (
    low_rank_linear,
    low_rank_linear_swiglu,
    low_rank_swiglu_linear,
)
from mindspeed.parallel.tensor.mappings import (
    copy_to_ranks,
    gather_sequence,
    reduce_partial,
    reduce_scatter_sequence,
)
from mindspeed.parallel.tensor.swiglu_linear import linear_swiglu, swiglu_linear

__all__ = [
    "DeferredGradients",
    "all_gather",
    "all_reduce",
    "copy_to_ranks",
    "dummy_gradient",
    "gather_sequence",
    "group_rank",
    "group_size",
    "grouped_linear",
    "linear",
    "linear_swiglu",
    "low_rank_linear",
    "low_rank_linear_swiglu",
    "low_rank_swiglu_linear",
    "reduce_partial",
    "reduce_scatter",
    "reduce_scatter_sequence",
    "swiglu_linear",
]
