"""Framework-independent part of the API: quantization recipes."""

from mindspeed.te.common import recipe

__all__ = ["recipe"]
