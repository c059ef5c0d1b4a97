"""Rotary embedding in the places where Megatron turns queries and keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed.ops.rotary_position_embedding import rotate_qk
from mindspeed.ops.rotary_position_embedding.packed import rotate_packed


def wrap_apply_rotary_pos_emb(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Turn by the operator; latent and rescaled (YaRN) embeddings stay with Megatron.

    So do packed ones of a sequence that is split over ranks. Megatron's own way with packed ones
    takes documents one by one, and waits for their lengths in every layer.
    """

    @functools.wraps(original)
    def apply_rotary_pos_emb(
        t: Tensor,
        freqs: Tensor,
        config: Any,
        cu_seqlens: Tensor | None = None,
        mscale: float = 1.0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        is_plain = mscale == 1.0 and not config.multi_latent_attention
        if is_plain and cu_seqlens is not None and _is_packed(t, freqs, config):
            return rotate_packed(t, freqs, cu_seqlens, config.rotary_interleaved)
        if not is_plain or cu_seqlens is not None or not _is_one_angle_a_token(t, freqs):
            return original(t, freqs, config, cu_seqlens, mscale, *args, **kwargs)
        return rotate_qk(t, None, freqs, None, config.rotary_interleaved)[0]

    return apply_rotary_pos_emb


def _is_packed(t: Tensor, freqs: Tensor, config: Any) -> bool:
    is_whole = config.context_parallel_size == 1
    return is_whole and t.dim() == 3 and freqs.dim() == 4 and freqs.shape[1:3] == (1, 1)


def _is_one_angle_a_token(t: Tensor, freqs: Tensor) -> bool:
    if not t.dim() == freqs.dim() == 4:
        return False
    tokens, batch, heads, _ = freqs.shape
    return tokens == t.shape[0] and batch in (1, t.shape[1]) and heads == 1


def wrap_attention_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let Megatron turn the packed qkv tensor in one piece wherever its own path allows that.

    Megatron asks the config, once for all calls, and fails in those that need them apart.
    """

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        asked = getattr(config, "fused_single_qkv_rope", None)
        if asked is None:  # a Megatron without that path
            return original(self, *args, **kwargs)
        config.fused_single_qkv_rope = asked or (len(args) < 3 and _is_one_piece(self, kwargs))
        try:
            return original(self, *args, **kwargs)
        finally:
            config.fused_single_qkv_rope = asked

    return forward


def _is_one_piece(layer: Any, given: dict[str, Any]) -> bool:
    config = layer.config
    is_plain_call = given.get("rotary_pos_emb") is not None and not any(
        given.get(name) is not None
        for name in ("inference_context", "inference_params", "packed_seq_params")
    )
    is_plain_rope = not (
        config.rotary_interleaved
        or config.multi_latent_attention
        or config.no_rope_freq
        or getattr(config, "yarn_rotary_scaling_factor", None)
    )
    has_norms = any(
        type(norm).__name__ not in ("NoneType", "IdentityOp")
        for norm in (getattr(layer, "q_layernorm", None), getattr(layer, "k_layernorm", None))
    )
    is_whole = config.num_query_groups >= config.tensor_model_parallel_size
    is_switched = config.test_mode or config.flash_decode
    is_gated = getattr(config, "attention_output_gate", False)
    return (
        is_plain_call
        and is_plain_rope
        and is_whole
        and layer.attention_type == "self"
        and not (has_norms or is_switched or is_gated)
    )
