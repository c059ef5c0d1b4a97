"""Tensor-parallel algorithms: linear layers of which each rank holds a shard."""

from mindspeed.parallel.tensor.frozen_weight import BufferedWeight, FrozenWeight
from mindspeed.parallel.tensor.grouped_linear import grouped_linear
from mindspeed.parallel.tensor.linear import DeferredGradients, dummy_gradient, linear
from mindspeed.parallel.tensor.low_rank_linear import (
    low_rank_linear,
    low_rank_linear_swiglu,
    low_rank_swiglu_linear,
)
from mindspeed.parallel.tensor.swiglu_linear import linear_swiglu, swiglu_linear

__all__ = [
    "BufferedWeight",
    "DeferredGradients",
    "FrozenWeight",
    "dummy_gradient",
    "grouped_linear",
    "linear",
    "linear_swiglu",
    "low_rank_linear",
    "low_rank_linear_swiglu",
    "low_rank_swiglu_linear",
    "swiglu_linear",
]
