"""One token a row through the layers of a model, with as few kernels as possible.

A decoding step is a chain of small kernels: most of its time are their launches and ends. A layer
of Megatron launches about twenty. Here it is eight: the residual sum with its norm, the qkv GEMM,
`decode_attention` with rotation and cache update, the output GEMM, again sum and norm, and the MLP
of a GEMM, SwiGLU and a GEMM. A model with layers of another kind keeps Megatron's forward pass.
Import the adaptor first.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from mindspeed.ops.decode_attention import decode_attention
from mindspeed.ops.norm import add_rms_norm, rms_norm
from mindspeed.ops.swiglu import swiglu
from mindspeed.te.pytorch.module.layernorm import RMSNorm
from mindspeed_llm.generation.inference import DecodeState, InferenceLinear, yarn_factor
from mindspeed_llm.generation.model import LoadedModel

logger = logging.getLogger(__name__)

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Runs tokens (rows, 1) at a position (1,) and returns the logits of the next ones."""

PLAIN = {
    "activation_func": F.silu,
    "activation_func_clamp_value": None,
    "attention_output_gate": False,
    "fp32_residual_connection": False,
    "gated_linear_unit": True,
    "glu_linear_offset": 0.0,
    "mtp_num_layers": None,
    "no_rope_freq": None,
    "rotary_interleaved": False,
    "use_te_activation_func": False,
}
"""The fields of a config that change what a layer computes, and their only supported values."""
NO_OPS = ("input_layernorm", "pre_cross_attn_layernorm", "cross_attention", "pre_mlp_layernorm")
"""The parts of a layer that have to do nothing; its norms belong to linear layers."""


def decode_step(model: LoadedModel, state: DecodeState) -> Step:
    """Return the fused step of a model, or Megatron's where its layers are of another kind."""
    reason = unsupported_part(model.chunks[0])
    if reason is None:
        return FusedStep(model, state)
    logger.info("decoding launches more kernels than it could: %s", reason)
    return state.step_at


def unsupported_part(module: Any) -> str | None:
    """Return what of a model the fused step does not know, None if it knows everything."""
    for name, plain in PLAIN.items():
        if (value := getattr(module.config, name, plain)) != plain:
            return f"{name} is {value}"
    final = module.decoder.final_layernorm
    if not isinstance(final, RMSNorm) or final.zero_centered_gamma:
        return "the final norm is of another kind"
    for layer in module.decoder.layers:
        if _attention(layer) is not None and not _is_plain(layer):
            return f"layer {layer.layer_number} has parts of another kind, or adapters"
    return None


def _attention(layer: Any) -> Any:
    """Return the attention of a layer, None for a layer that does nothing."""
    return getattr(layer, "self_attention", None)


def _is_plain(layer: Any) -> bool:
    kinds = type(layer), type(layer.self_attention), type(layer.mlp)
    if kinds != (TransformerLayer, SelfAttention, MLP):
        return False
    if not all(isinstance(getattr(layer, name), IdentityOp) for name in NO_OPS):
        return False
    if any(part._forward_hooks for part in layer.modules()):
        return False
    normed = layer.self_attention.linear_qkv, layer.mlp.linear_fc1
    others = layer.self_attention.linear_proj, layer.mlp.linear_fc2
    return all(
        isinstance(linear, InferenceLinear)
        and linear.group is None
        and (linear.norm is not None) == (linear in normed)
        for linear in (*normed, *others)
    )


class FusedStep:
    """The forward pass of one token a row, on the KV cache of a decode state.

    It looks for the layers at every call: a rollout exchanges those of training for its own.
    """

    def __init__(self, model: LoadedModel, state: DecodeState) -> None:
        self._model, self._state = model, state

    def __call__(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Run tokens (rows, 1) at a position (1,); return the logits of the next ones."""
        (module,) = self._model.chunks
        embedded = module.embedding(input_ids=tokens, position_ids=torch.zeros_like(tokens))
        hidden, added = embedded.squeeze(0), None
        for layer in module.decoder.layers:
            if (attention := _attention(layer)) is None:
                continue
            linear = attention.linear_qkv
            normed, hidden = _add_norm(added, hidden, linear.norm, linear.eps)
            added = self._attend(attention, linear.project(normed), position)
            linear = layer.mlp.linear_fc1
            normed, hidden = _add_norm(added, hidden, linear.norm, linear.eps)
            added = layer.mlp.linear_fc2.project(swiglu(linear.project(normed)))
        final = module.decoder.final_layernorm
        normed, _ = _add_norm(added, hidden, final.weight, final.eps)
        weight = None
        if module.share_embeddings_and_output_weights:
            weight = module.shared_embedding_or_output_weight()
        logits, _ = module.output_layer(
            normed.unsqueeze(0), weight=weight, runtime_gather_output=True
        )
        found: torch.Tensor = logits[0, :, : self._model.config.vocab_size]
        return found

    def _attend(self, attention: Any, qkv: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return what attention adds to the residual, of (rows, groups * (queries + 2) * size)."""
        cache = self._state.cache
        groups = attention.num_query_groups_per_partition
        size = attention.hidden_size_per_attention_head
        heads = qkv.view(len(qkv), groups, -1, size)
        query, key, value = heads[:, :, :-2], heads[:, :, -2], heads[:, :, -1]
        if attention.q_layernorm is not None:
            query = attention.q_layernorm(query)
        if attention.k_layernorm is not None:
            key = attention.k_layernorm(key)
        out = decode_attention(
            query,
            key,
            value,
            cache.key_value_memory_dict[attention.layer_number],
            position,
            scale=attention.core_attention.softmax_scale,
            first=self._state.padding,
            rotary=cache.rotary_tables(yarn_factor(attention.config), qkv.dtype),
        )
        projected: torch.Tensor = attention.linear_proj.project(out.view(len(qkv), -1))
        return projected


def _add_norm(
    added: torch.Tensor | None, hidden: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the sum, and the sum; there is nothing to add to the embeddings."""
    if added is None:
        return rms_norm(hidden, weight, eps), hidden
    total: tuple[torch.Tensor, torch.Tensor] = add_rms_norm(added, hidden, weight, eps)
    return total
