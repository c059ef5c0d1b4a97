"""Attention under the module path of transformer_engine."""

from mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention import (
    DotProductAttention,
)

__all__ = ["DotProductAttention"]
