"""A whole layer of a transformer, for models that are not built from Megatron's specs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from mindspeed.te.pytorch.attention import DotProductAttention
from mindspeed.te.pytorch.attention.masks import MaskTensors
from mindspeed.te.pytorch.module import LayerNormLinear, LayerNormMLP, Linear

_PARTS = ("query_", "key_", "value_")


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then the same with an MLP; on tensors (S, B, hidden).

    Args:
        fuse_qkv_params: keep queries, keys and values in one parameter rather than in three.
        options: what the linear layers share: params_dtype, device, bias.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        *,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        normalization: str = "LayerNorm",
        self_attn_mask_type: str = "causal",
        fuse_qkv_params: bool = False,
        layer_number: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        norm: dict[str, Any] = {"eps": layernorm_epsilon, "normalization": normalization}
        self._heads = (num_attention_heads, hidden_size // num_attention_heads)
        self._hidden_dropout = hidden_dropout
        self.qkv = LayerNormLinear(
            hidden_size,
            3 * hidden_size,
            parameters_split=None if fuse_qkv_params else _PARTS,
            **norm,
            **options,
        )
        self.attention = DotProductAttention(
            *self._heads,
            attention_dropout=attention_dropout,
            attn_mask_type=self_attn_mask_type,
            layer_number=layer_number,
        )
        self.projection = Linear(hidden_size, hidden_size, **options)
        self.mlp = LayerNormMLP(hidden_size, ffn_hidden_size, **norm, **options)

    def forward(self, hidden_states: Tensor, attention_mask: MaskTensors = None) -> Tensor:
        """Return what the next layer takes."""
        parts = self.qkv(hidden_states).chunk(3, dim=-1)
        heads = [part.unflatten(-1, self._heads) for part in parts]
        seen = self.attention(*heads, attention_mask)
        hidden_states = hidden_states + self._drop(self.projection(seen))
        return hidden_states + self._drop(self.mlp(hidden_states))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self._hidden_dropout, self.training)
