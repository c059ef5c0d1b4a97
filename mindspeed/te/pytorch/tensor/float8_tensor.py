"""Float8Tensor, under the path that Megatron imports it from."""

from mindspeed.te.pytorch.tensor.quantized_tensor import QuantizedTensor


class Float8Tensor(QuantizedTensor):
    """FP8 values with one scale."""
