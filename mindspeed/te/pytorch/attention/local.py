"""The attention of this package in the place of the one that Megatron's local specs build."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from mindspeed.te.pytorch.attention.core import Softmax, attend_batch
from mindspeed.te.pytorch.attention.masks import MaskRule

_REST = ("attn_mask_type", "attention_bias", "packed_seq_params")


def wrap_dot_product_attention_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute `DotProductAttention.forward` without a matrix of scores.

    A causal layer ignores the mask tensor, as Megatron's own fused softmax does. A softmax with a
    sink, a bias and packed sequences stay with Megatron, which computes or refuses them.
    """

    @functools.wraps(original)
    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        rest = dict(zip(_REST, args)) | kwargs
        # The mask type of a call is not read by Megatron either.
        asks_more = any(rest.get(name) is not None for name in _REST[1:])
        asks_more |= getattr(self, "attention", None) is not None  # of a split sequence
        if asks_more or getattr(self, "softmax_offset", None) is not None:
            return original(self, query, key, value, attention_mask, *args, **kwargs)
        rule = _rule(self, query.shape[0], key.shape[0], attention_mask)
        dropout = self.attention_dropout.p if self.training else 0.0
        # Megatron divides the scores by the layer number, and multiplies again in float32.
        scale = self.softmax_scale * (self.scale_mask_softmax.scale or 1)
        with _random_state(self, dropout):
            softmax = Softmax(scale, dropout)
            return attend_batch(query, key, value, rule, softmax, mask=attention_mask)

    return forward


def _rule(layer: Any, num_q: int, num_k: int, mask: Tensor | None) -> MaskRule:
    window = getattr(layer.scale_mask_softmax, "window_size", None)
    if window is not None:
        return MaskRule.of("causal_bottom_right", window)
    kind = layer.attn_mask_type.name
    if kind == "causal" and num_q != num_k:
        # With a cache of keys; the caller's mask knows which of them are there.
        fits = mask is not None and mask.shape[-2:] == (num_q, num_k)
        kind = "arbitrary" if fits else "causal_bottom_right"
    elif "causal" not in kind and mask is None:
        kind = "no_mask"
    return MaskRule.of(kind if kind != "padding" else "arbitrary", None)


def _random_state(layer: Any, dropout: float) -> AbstractContextManager[None]:
    if not dropout or layer.config.sequence_parallel:
        return nullcontext()
    from megatron.core import tensor_parallel

    return tensor_parallel.get_cuda_rng_tracker().fork()
