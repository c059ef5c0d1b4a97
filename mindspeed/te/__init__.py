"""The part of Transformer Engine that Megatron plugs into, for every device.

Where NVIDIA's package is absent, this one answers to the name `transformer_engine`.
"""

from mindspeed.te import common, pytorch

# Megatron chooses its branches by this number. From 2.8 on it lets delayed weight gradients meet
# overlapped gradient reduction, up to 2.9 all it then asks for is served or refused in our words.
# At 2.10 it wants an environment variable of NVIDIA's offloading, at 2.14 experts in one tensor.
__version__ = "2.9.0"

__all__ = ["__version__", "common", "pytorch"]
