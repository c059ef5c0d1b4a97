"""The place where Megatron's checkpoint code looks for the FP8 tensor class."""

from mindspeed.te.pytorch.tensor.float8_tensor import Float8Tensor

__all__ = ["Float8Tensor"]
