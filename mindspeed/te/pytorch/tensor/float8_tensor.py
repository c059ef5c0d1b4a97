"""The class under which Megatron looks for these tensors."""

from mindspeed.te.pytorch.tensor.quantized_tensor import QuantizedTensor


class Float8Tensor(QuantizedTensor):
    """FP8 values with one scale."""
