"""`grouped_gemm` as far as Megatron's GroupedMLP uses it."""

from mindspeed.compat.grouped_gemm import ops

__all__ = ["ops"]
