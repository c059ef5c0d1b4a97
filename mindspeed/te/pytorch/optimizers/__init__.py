"""Optimizers and multi-tensor helpers under the names Megatron imports."""

from mindspeed.te.pytorch.optimizers.fused_adam import FusedAdam
from mindspeed.te.pytorch.optimizers.fused_sgd import FusedSGD
from mindspeed.te.pytorch.optimizers.multi_tensor_apply import (
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_unscale_l2norm,
)

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_unscale_l2norm",
]
