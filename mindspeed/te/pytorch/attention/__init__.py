"""Attention and rotary embedding under the names Megatron imports."""

from mindspeed.te.pytorch.attention.dot_product_attention import DotProductAttention
from mindspeed.te.pytorch.attention.rope import apply_rotary_pos_emb
from mindspeed.te.pytorch.attention.split import _SplitAlongDim

__all__ = ["DotProductAttention", "_SplitAlongDim", "apply_rotary_pos_emb"]
