"""Operators: one contract each, several implementations, chosen by device."""

from mindspeed.ops.matmul_add_fp32 import matmul_add_fp32 as npu_matmul_add_fp32
from mindspeed.ops.rms_norm import rms_norm as npu_rms_norm
from mindspeed.ops.swiglu import swiglu as npu_swiglu

__all__ = [
    "npu_matmul_add_fp32",
    "npu_rms_norm",
    "npu_swiglu",
]
