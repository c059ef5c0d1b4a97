"""Weights between Hugging Face folders and the sharded checkpoints (DCP) of training."""

from mindspeed_mm.checkpoint.options import ConvertOptions

__all__ = ["ConvertOptions"]
