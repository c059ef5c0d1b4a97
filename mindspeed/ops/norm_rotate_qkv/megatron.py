"""Norms of queries and keys in Megatron's attention that run as one with the rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mindspeed.ops.module_hooks import (
    has_global_hooks,
    has_known_pre_hooks,
    is_untouched,
    run_forward_pre_hooks,
)
from mindspeed.ops.norm_rotate_qkv import norm_rotate_qkv
from mindspeed.ops.rotary_position_embedding.packed import document_positions

RMS_NORMS = {
    "mindspeed.te.pytorch.module.layernorm.RMSNorm",
    "mindspeed.ops.norm.megatron.FusedRMSNorm",
    "mindspeed.compat.layers.RMSNorm",
    "torch.nn.modules.normalization.RMSNorm",
}
"""Classes with `weight`, `eps` and perhaps `zero_centered_gamma` that compute this norm."""


class HeadNorms(NamedTuple):
    """The norms of one layer's queries and keys."""

    q: Any
    k: Any

    def norm_rotate(
        self, qkv: Tensor, freqs: Tensor, sizes: Sequence[int], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split qkv, norm its heads and rotate them, each document of a row from its start."""
        for norm in self:
            run_forward_pre_hooks(norm, qkv)
        split: tuple[Tensor, Tensor, Tensor] = norm_rotate_qkv(
            *(qkv, self.q.weight, self.k.weight, freqs, sizes, self.q.eps),
            positions=document_positions(qkv, cu_seqlens),
            zero_centered=_is_zero_centered(self.q),
        )
        return split


def has_norms(layer: Any) -> bool:
    """Return whether an attention layer has norms of queries or keys, of whatever kind."""
    return any(type(norm).__name__ not in ("NoneType", "IdentityOp") for norm in _norms(layer))


def fusable_norms(layer: Any, hidden: Tensor) -> HeadNorms | None:
    """Return the norms of a layer that the operator computes alike, None for any others.

    `hidden` is what the layer is called with.
    """
    q, k = norms = _norms(layer)
    if not all(_is_rms_norm_of(norm, layer.hidden_size_per_attention_head) for norm in norms):
        return None
    is_alike = q.eps == k.eps and _is_zero_centered(q) == _is_zero_centered(k)
    # The dtype of weights is that of the norm's result; autocast would change it.
    has_one_dtype = q.weight.dtype == k.weight.dtype == hidden.dtype
    is_cast = torch.is_autocast_enabled(hidden.device.type)
    if not (is_alike and has_one_dtype) or is_cast or has_global_hooks():
        return None
    return HeadNorms(q, k)


def _norms(layer: Any) -> tuple[Any, Any]:
    return getattr(layer, "q_layernorm", None), getattr(layer, "k_layernorm", None)


def _is_rms_norm_of(norm: Any, head_dim: int) -> bool:
    kind = type(norm)
    return (
        f"{kind.__module__}.{kind.__qualname__}" in RMS_NORMS
        and isinstance(norm, nn.Module)
        and type(norm.weight) is nn.Parameter  # not sharded
        and norm.weight.shape == (head_dim,)
        and isinstance(norm.eps, float)
        and getattr(norm, "residual_norm", None) is None
        and is_untouched(norm)
        and has_known_pre_hooks(norm)
    )


def _is_zero_centered(norm: Any) -> bool:
    return bool(getattr(norm, "zero_centered_gamma", False))
