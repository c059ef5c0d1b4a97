"""Operators: one contract each, several implementations, chosen by device."""

from mindspeed.ops.adamw import apply_fused_ema_adamw as npu_apply_fused_ema_adamw
from mindspeed.ops.all_to_all_all_gather_bmm import (
    all_to_all_all_gather_bmm as npu_all_to_all_all_gather_bmm,
)
from mindspeed.ops.all_to_all_all_gather_bmm import (
    all_to_all_all_gather_bmm as npu_alltoall_allgather_bmm,
)
from mindspeed.ops.bmm_reduce_scatter_all_to_all import (
    bmm_reduce_scatter_all_to_all as npu_bmm_reduce_scatter_all_to_all,
)
from mindspeed.ops.bmm_reduce_scatter_all_to_all import (
    bmm_reduce_scatter_all_to_all as npu_bmm_reducescatter_alltoall,
)
from mindspeed.ops.ffn import ffn as npu_ffn
from mindspeed.ops.fusion_attention import fusion_attention as npu_fusion_attention
from mindspeed.ops.fusion_attention import fusion_attention as npu_fusion_attention_v2
from mindspeed.ops.gmm import gmm as npu_gmm
from mindspeed.ops.gmm import gmm_v2 as npu_gmm_v2
from mindspeed.ops.grouped_mat_mul_all_reduce import (
    grouped_mat_mul_all_reduce as npu_grouped_mat_mul_all_reduce,
)
from mindspeed.ops.groupmatmul_add_fp32 import groupmatmul_add_fp32 as npu_groupmatmul_add_fp32
from mindspeed.ops.lcal_coc import coc_ops
from mindspeed.ops.matmul_add_fp32 import matmul_add_fp32 as npu_matmul_add_fp32
from mindspeed.ops.mm_all_reduce_add_rms_norm import (
    mm_all_reduce_add_rms_norm as npu_mm_all_reduce_add_rms_norm,
)
from mindspeed.ops.mm_all_reduce_add_rms_norm import (
    mm_all_reduce_add_rms_norm_ as npu_mm_all_reduce_add_rms_norm_,
)
from mindspeed.ops.moe_token_permute import moe_token_permute as npu_fused_moe_token_permute
from mindspeed.ops.moe_token_permute import moe_token_permute as npu_moe_token_permute
from mindspeed.ops.moe_token_permute import moe_token_unpermute as npu_fused_moe_token_unpermute
from mindspeed.ops.moe_token_permute import moe_token_unpermute as npu_moe_token_unpermute
from mindspeed.ops.norm import dropout_add_layer_norm as npu_dropout_add_layer_norm
from mindspeed.ops.norm import dropout_add_rms_norm as npu_dropout_add_rms_norm
from mindspeed.ops.norm import rms_norm as npu_rms_norm
from mindspeed.ops.quant_gmm import quant_gmm as npu_quant_gmm
from mindspeed.ops.quant_gmm import quant_gmm_v2 as npu_quant_gmm_v2
from mindspeed.ops.quant_gmm import weight_quant_gmm as npu_weight_quant_gmm
from mindspeed.ops.ring_attention_update import (
    ring_attention_update as npu_ring_attention_update,
)
from mindspeed.ops.rotary_position_embedding import (
    rotary_position_embedding as npu_rotary_position_embedding,
)
from mindspeed.ops.swiglu import swiglu as npu_swiglu

__all__ = [
    "coc_ops",
    "npu_all_to_all_all_gather_bmm",
    "npu_alltoall_allgather_bmm",
    "npu_apply_fused_ema_adamw",
    "npu_bmm_reduce_scatter_all_to_all",
    "npu_bmm_reducescatter_alltoall",
    "npu_dropout_add_layer_norm",
    "npu_dropout_add_rms_norm",
    "npu_ffn",
    "npu_fused_moe_token_permute",
    "npu_fused_moe_token_unpermute",
    "npu_fusion_attention",
    "npu_fusion_attention_v2",
    "npu_gmm",
    "npu_gmm_v2",
    "npu_grouped_mat_mul_all_reduce",
    "npu_groupmatmul_add_fp32",
    "npu_matmul_add_fp32",
    "npu_mm_all_reduce_add_rms_norm",
    "npu_mm_all_reduce_add_rms_norm_",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "npu_quant_gmm",
    "npu_quant_gmm_v2",
    "npu_ring_attention_update",
    "npu_rms_norm",
    "npu_rotary_position_embedding",
    "npu_swiglu",
    "npu_weight_quant_gmm",
]
