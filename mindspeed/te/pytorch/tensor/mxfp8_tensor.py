"""MXFP8Tensor, under the path that Megatron imports it from."""

from mindspeed.te.pytorch.tensor.quantized_tensor import QuantizedTensor


class MXFP8Tensor(QuantizedTensor):
    """FP8 values with one power of two for 32 of them."""
