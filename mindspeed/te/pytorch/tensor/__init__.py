"""Quantized tensor classes; no tensor is an instance of them, so isinstance() returns False."""

from mindspeed.te.pytorch.tensor.float8_tensor import Float8Tensor
from mindspeed.te.pytorch.tensor.mxfp8_tensor import MXFP8Tensor
from mindspeed.te.pytorch.tensor.quantized_tensor import QuantizedTensor

__all__ = ["Float8Tensor", "MXFP8Tensor", "QuantizedTensor"]
