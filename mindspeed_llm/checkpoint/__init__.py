"""Weights from anywhere to anywhere: HF safetensors, mcore directories, torch_dist, live models.

What needs torch is imported from its own module: `conversion.convert`, `loading.load_weights`.
"""

from mindspeed_llm.checkpoint.detection import Found, detect
from mindspeed_llm.checkpoint.options import ConvertOptions

__all__ = ["ConvertOptions", "Found", "detect"]
