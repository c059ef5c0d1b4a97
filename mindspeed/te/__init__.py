"""The part of Transformer Engine that Megatron plugs into, for every device.

Where NVIDIA's package is absent, this one answers to the name `transformer_engine`.
"""

from mindspeed.te import common, pytorch

# Megatron chooses its branches by this number. From 2.8 on it allows delayed weight gradients with
# overlapped gradient reduction; up to 2.9 every call it then makes is implemented or refused here.
# 2.10 needs an environment variable of NVIDIA's offloading, 2.14 experts in one tensor.
__version__ = "2.9.0"

__all__ = ["__version__", "common", "pytorch"]
