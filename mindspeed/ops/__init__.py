"""Operators: one contract each, several implementations, chosen by device."""

from mindspeed.ops.apply_fused_ema_adamw import (
    apply_fused_ema_adamw as npu_apply_fused_ema_adamw,
)
from mindspeed.ops.gmm import gmm as npu_gmm
from mindspeed.ops.gmm import gmm_v2 as npu_gmm_v2
from mindspeed.ops.groupmatmul_add_fp32 import groupmatmul_add_fp32 as npu_groupmatmul_add_fp32
from mindspeed.ops.matmul_add_fp32 import matmul_add_fp32 as npu_matmul_add_fp32
from mindspeed.ops.moe_token_permute import moe_token_permute as npu_fused_moe_token_permute
from mindspeed.ops.moe_token_permute import moe_token_permute as npu_moe_token_permute
from mindspeed.ops.moe_token_unpermute import moe_token_unpermute as npu_fused_moe_token_unpermute
from mindspeed.ops.moe_token_unpermute import moe_token_unpermute as npu_moe_token_unpermute
from mindspeed.ops.rms_norm import rms_norm as npu_rms_norm
from mindspeed.ops.rotary_position_embedding import (
    rotary_position_embedding as npu_rotary_position_embedding,
)
from mindspeed.ops.swiglu import swiglu as npu_swiglu

__all__ = [
    "npu_apply_fused_ema_adamw",
    "npu_fused_moe_token_permute",
    "npu_fused_moe_token_unpermute",
    "npu_gmm",
    "npu_gmm_v2",
    "npu_groupmatmul_add_fp32",
    "npu_matmul_add_fp32",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "npu_rms_norm",
    "npu_rotary_position_embedding",
    "npu_swiglu",
]
