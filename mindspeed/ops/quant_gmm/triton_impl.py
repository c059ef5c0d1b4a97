"""Grouped GEMM of int8 tensors by the kernel of gmm, which accumulates in int32."""

from mindspeed.ops.gmm.triton_impl import rows
from mindspeed.ops.quant_gmm.reference import make_operators

quant_gmm, quant_gmm_v2 = make_operators(rows)
