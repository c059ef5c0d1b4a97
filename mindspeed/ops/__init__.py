"""Operators: one contract each, several implementations, chosen by device."""

from mindspeed.ops.gmm import gmm as npu_gmm
from mindspeed.ops.gmm import gmm_v2 as npu_gmm_v2
from mindspeed.ops.groupmatmul_add_fp32 import groupmatmul_add_fp32 as npu_groupmatmul_add_fp32
from mindspeed.ops.matmul_add_fp32 import matmul_add_fp32 as npu_matmul_add_fp32
from mindspeed.ops.rms_norm import rms_norm as npu_rms_norm
from mindspeed.ops.swiglu import swiglu as npu_swiglu

__all__ = [
    "npu_gmm",
    "npu_gmm_v2",
    "npu_groupmatmul_add_fp32",
    "npu_matmul_add_fp32",
    "npu_rms_norm",
    "npu_swiglu",
]
