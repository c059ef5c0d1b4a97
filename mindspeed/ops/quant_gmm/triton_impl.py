"""Grouped products of int8 tensors by the kernel of gmm, whose sums are int32."""

from mindspeed.ops.gmm.triton_impl import rows
from mindspeed.ops.quant_gmm.reference import operators

quant_gmm, quant_gmm_v2 = operators(rows)
