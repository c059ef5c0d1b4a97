"""`grouped_gemm` as far as Megatron's GroupedMLP uses it."""

from mindspeed.compat.stand_ins.grouped_gemm import ops

__all__ = ["ops"]
