"""Wraps the functions by which Megatron rotates queries and keys."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from mindspeed.ops.norm_rotate_qkv.megatron import HeadNorms, fusable_norms, has_norms
from mindspeed.ops.packed_batch import describe
from mindspeed.ops.rotary_position_embedding import rotate_qk, rotate_qkv
from mindspeed.ops.rotary_position_embedding.packed import document_positions, rotate_packed


def wrap_apply_rotary_pos_emb(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Rotate by the operator; latent and rescaled (YaRN) embeddings fall back to Megatron.

    So do packed sequences with context parallelism. Megatron's own code for packed sequences takes
    documents one by one, and synchronises with the device for their lengths in every layer.
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
        if not is_plain or cu_seqlens is not None or not _has_one_angle_per_token(t, freqs):
            return original(t, freqs, config, cu_seqlens, mscale, *args, **kwargs)
        return rotate_qk(t, None, freqs, None, config.rotary_interleaved)[0]

    return apply_rotary_pos_emb


def _is_packed(t: Tensor, freqs: Tensor, config: Any) -> bool:
    return t.dim() == 3 and _is_packed_table(freqs, config)


def _has_one_angle_per_token(t: Tensor, freqs: Tensor) -> bool:
    if not t.dim() == freqs.dim() == 4:
        return False
    tokens, batch, heads, _ = freqs.shape
    return tokens == t.shape[0] and batch in (1, t.shape[1]) and heads == 1


def wrap_attention_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Rotate queries and keys out of the packed qkv tensor, in the calls that support it.

    Their gradients are then written into one tensor, too, instead of being joined. Megatron 0.12
    does not offer that; later versions take neither packed sequences nor norms of queries and keys,
    and decide by the config, once for all calls. Here qkv is rotated before Megatron sees it.
    """

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_fusable = len(args) < 3 and _is_fusable(self, kwargs)
        rotation = _rotation(self, *args, **kwargs) if is_fusable else None
        if rotation is None:
            return original(self, *args, **kwargs)
        with _rotated_qkv(self, rotation):
            return original(self, *args, **kwargs | {"rotary_pos_emb": None})

    return forward


class _Rotation(NamedTuple):
    """How a layer's packed qkv tensor becomes queries, keys and values in one call."""

    freqs: Tensor
    cu_seqlens: Tensor | None
    """Bounds of the documents in a row; None for whole rows."""
    norms: HeadNorms | None

    def apply(self, qkv: Tensor, sizes: list[int], interleaved: bool) -> tuple[Tensor, ...]:
        if self.norms is not None:
            return self.norms.norm_rotate(qkv, self.freqs, sizes, self.cu_seqlens)
        positions = document_positions(qkv, self.cu_seqlens)
        rotated: tuple[Tensor, ...] = rotate_qkv(qkv, self.freqs, sizes, interleaved, positions)
        return rotated


def _rotation(
    layer: Any,
    hidden_states: Tensor,
    *_: Any,
    rotary_pos_emb: Any,
    packed_seq_params: Any = None,
    **__: Any,
) -> _Rotation | None:
    """Return the rotation of a call of Attention.forward, None where Megatron's own is needed."""
    freqs, bounds = rotary_pos_emb, None
    if packed_seq_params is not None:
        bounds = _document_bounds(packed_seq_params)
        if bounds is None or not _is_packed_table(freqs, layer.config):
            return None
    elif not _has_angles_of(hidden_states, freqs, layer.config):
        return None
    norms = fusable_norms(layer, hidden_states)
    return None if norms is None and has_norms(layer) else _Rotation(freqs, bounds, norms)


@contextmanager
def _rotated_qkv(layer: Any, rotation: _Rotation) -> Iterator[None]:
    """Let a layer rotate queries and keys as it splits qkv."""

    def get_query_key_value_tensors(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        qkv, sizes = _packed_qkv(layer, *args, **kwargs)
        return rotation.apply(qkv, sizes, layer.config.rotary_interleaved)

    layer.get_query_key_value_tensors = get_query_key_value_tensors
    try:
        yield
    finally:
        del layer.get_query_key_value_tensors


def _packed_qkv(layer: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, list[int]]:
    """Return (S, B, groups, queries | key | value) and the sizes of the three."""
    if _can_leave_packed():
        split = type(layer).get_query_key_value_tensors
        packed: tuple[Tensor, list[int]] = split(
            layer, hidden, *args, **kwargs | {"split_qkv": False}
        )
        return packed
    qkv, _ = layer.linear_qkv(hidden)
    groups, size = layer.num_query_groups_per_partition, layer.hidden_size_per_attention_head
    sizes = [layer.num_attention_heads_per_partition // groups * size, size, size]
    return qkv.view(*qkv.shape[:-1], groups, sum(sizes)), sizes


@functools.cache
def _can_leave_packed() -> bool:
    """Return whether Megatron's own method can leave the tensor as it is; that of 0.12 cannot."""
    from megatron.core.transformer.attention import SelfAttention

    return "split_qkv" in inspect.signature(SelfAttention.get_query_key_value_tensors).parameters


def _has_angles_of(hidden: Tensor, freqs: Any, config: Any) -> bool:
    """Return whether freqs has a row for each token of a layer whose input is (S, B, H)."""
    shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
    is_table = isinstance(freqs, Tensor) and freqs.dim() == 4 and freqs.shape[2] == 1
    tokens, batch = shards * hidden.shape[0], hidden.shape[1]
    return is_table and freqs.shape[0] == tokens and freqs.shape[1] in (1, batch)


def _document_bounds(packed: Any) -> Tensor | None:
    """Return the cumulative lengths that queries and keys of packed sequences share, if they do.

    Keys of a shared prefix are rows of another document: the lengths differ, the positions do not.
    """
    if packed.qkv_format != "thd":
        return None
    of_q, of_kv = (
        getattr(packed, f"cu_seqlens_{part}") if padded is None else padded
        for part in ("q", "kv")
        for padded in [getattr(packed, f"cu_seqlens_{part}_padded", None)]
    )
    positions = describe(of_q).positions
    is_same = positions is not None and positions is describe(of_kv).positions
    return of_q if of_q is of_kv or is_same else None


def _is_packed_table(freqs: Any, config: Any) -> bool:
    """Return whether freqs has the angles of positions; multimodal ones are those of tokens."""
    if getattr(config, "mrope_section", None):
        return False
    is_table = isinstance(freqs, Tensor) and freqs.dim() == 4 and freqs.shape[1:3] == (1, 1)
    return is_table and config.context_parallel_size == 1


def _is_fusable(layer: Any, kwargs: dict[str, Any]) -> bool:
    config = layer.config
    is_plain_call = kwargs.get("rotary_pos_emb") is not None and not any(
        kwargs.get(name) is not None for name in ("inference_context", "inference_params")
    )
    is_plain_rope = not (
        config.rotary_interleaved
        or config.multi_latent_attention
        or getattr(config, "no_rope_freq", None)
        or getattr(config, "yarn_rotary_scaling_factor", None)
    )
    is_whole = config.num_query_groups >= config.tensor_model_parallel_size
    # A user may have asked for Megatron's own way.
    is_switched = getattr(config, "fused_single_qkv_rope", False) or config.flash_decode
    is_gated = getattr(config, "attention_output_gate", False)
    is_offloaded = getattr(layer, "offload_qkv_linear", False)
    return (
        is_plain_call
        and is_plain_rope
        and is_whole
        and layer.attention_type == "self"
        and _splits_as_megatron(layer)
        and not (is_switched or is_gated or is_offloaded or config.test_mode)
    )


def _splits_as_megatron(layer: Any) -> bool:
    """Return whether the layer makes its qkv by Megatron's own method."""
    from megatron.core.transformer.attention import SelfAttention

    name = "get_query_key_value_tensors"
    method = getattr(type(layer), name)
    is_megatrons = method.__module__ == SelfAttention.__module__  # not one that replaces it
    is_wrapped = name in vars(layer) or hasattr(method, "__wrapped__")
    return method is getattr(SelfAttention, name) and is_megatrons and not is_wrapped
