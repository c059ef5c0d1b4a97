"""Weights between HF safetensors, mcore directories, torch_dist checkpoints and live models.

What needs torch is imported from its own module: `conversion.convert`, `loading.load_weights`.
"""

from mindspeed_llm.checkpoint.options import ConvertOptions

__all__ = ["ConvertOptions"]
