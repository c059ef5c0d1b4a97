"""Megatron's attention classes on this package's attention, where a feature asks for it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops.packed_batch import describe, host_bounds
from mindspeed.parallel.context.whole_documents import whole_documents
from mindspeed.te.pytorch.attention.dot_product_attention import DotProductAttention

_REST = ("attn_mask_type", "attention_bias", "packed_seq_params")
# What features set in an attention that is built.
_SETTINGS = ("alibi_slopes", "cp_document_layout", "cp_window_size", "reads_mask")
# What it takes of Megatron's PackedSeqParams.
_PACKED = ("qkv_format", *(f"cu_seqlens_{x}" for x in ("q", "kv", "q_padded", "kv_padded")))


def wrap_init(original: Callable[..., None], attributes: Mapping[str, Any]) -> Callable[..., None]:
    """Set attributes of the attention that a TE spec builds."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        vars(_attention_of(self)).update(attributes)

    return __init__


def wrap_alibi_init(original: Callable[..., None], is_opposite: bool) -> Callable[..., None]:
    """Give the attention of any spec the ALiBi slopes of this rank's heads."""

    @functools.wraps(original)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        slopes = alibi_slopes(config.num_attention_heads) * (-1 if is_opposite else 1)
        attention, size = _attention_of(self), config.tensor_model_parallel_size
        rank = attention.tp_group.rank() if size > 1 else 0
        attention.alibi_slopes = slopes.chunk(size)[rank].to(torch.get_default_device())

    return __init__


def wrap_local_init(
    original: Callable[..., None], attributes: Mapping[str, Any]
) -> Callable[..., None]:
    """Build this package's attention, with some attributes, in that of a local spec.

    Its own checks refuse context parallelism; they see a config without.
    """

    @functools.wraps(original)
    def __init__(
        self: Any,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        whole = copy.copy(config)
        whole.context_parallel_size = 1
        original(self, whole, layer_number, attn_mask_type, attention_type, *args, **kwargs)
        # Where two features wrap, the inner one has built it from the config without.
        inner = getattr(self, "attention", None)
        self.config = config
        self.attention = _build(self, *args, **kwargs)
        kept = {} if inner is None else {name: vars(inner)[name] for name in _SETTINGS}
        vars(self.attention).update(kept | dict(attributes))

    return __init__


def wrap_local_alibi_init(original: Callable[..., None], is_opposite: bool) -> Callable[..., None]:
    """Build this package's attention with ALiBi in that of a local spec."""
    return wrap_alibi_init(wrap_local_init(original, {}), is_opposite)


def wrap_local_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attend by this package where `wrap_local_init` has built its attention."""

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
        if getattr(self, "attention", None) is None:
            return original(self, query, key, value, attention_mask, *args, **kwargs)
        rest = dict(zip(_REST, args)) | kwargs
        packed, options = rest.get("packed_seq_params"), {}
        if packed is not None:
            options = {name: getattr(packed, name) for name in _PACKED}
        if (bias := rest.get("attention_bias")) is not None:
            options |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
        return self.attention(query, key, value, attention_mask, **options)

    return forward


def wrap_apply_rotary_pos_emb(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Rotate packed documents whose tokens are not where Megatron takes them to be.

    That is where ranks share them by `whole_documents`, and where positions are registered, since
    documents share a prefix. Every token gets the angle of its position, and the sequence is
    rotated as if it were one.
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
        # Multimodal angles are those of tokens, not of positions.
        is_by_token = getattr(config, "mrope_section", None)
        positions = None
        if cu_seqlens is not None and not is_by_token:
            group = args[0] if args else kwargs.get("cp_group")
            positions = _known_positions(cu_seqlens, group or _context_group(), freqs.device)
        if positions is None:
            return original(t, freqs, config, cu_seqlens, mscale, *args, **kwargs)
        angles = freqs.index_select(0, positions)
        return original(t.unsqueeze(1), angles, config, None, mscale, *args, **kwargs).squeeze(1)

    return apply_rotary_pos_emb


def _context_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


def _known_positions(cu_seqlens: Tensor, group: Any, device: torch.device) -> Tensor | None:
    """Return the position of each row of this rank; None where Megatron knows it."""
    given = describe(cu_seqlens).positions
    if given is not None or group.size() == 1:
        return given
    return _positions(tuple(host_bounds(cu_seqlens)), group.size(), group.rank(), device)


@functools.lru_cache(maxsize=64)
def _positions(bounds: tuple[int, ...], size: int, rank: int, device: torch.device) -> Tensor:
    """Return where in its document each row of a rank is."""
    rows = whole_documents(bounds, size).index(rank)
    starts = torch.tensor(bounds)
    return (rows - starts[torch.searchsorted(starts, rows, right=True) - 1]).to(device)


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the slopes of "Train Short, Test Long": 2^(-8 i / n), i from 1 to n a power of two.

    For other numbers, those of the next smaller power, then every second of twice as many.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes)


def _attention_of(module: Any) -> Any:
    """Return the attention inside a local one, or a TE spec's, which is one itself."""
    return module if isinstance(module, DotProductAttention) else module.attention


def _build(layer: Any, *args: Any, **kwargs: Any) -> DotProductAttention:
    from megatron.core import parallel_state, tensor_parallel

    names = ("attention_dropout", "softmax_scale", "cp_comm_type", "pg_collection")
    given = dict(zip(names, args)) | kwargs
    config, comm_type = layer.config, given.get("cp_comm_type")
    groups = given.get("pg_collection")
    group = getattr(groups, "cp", None) or parallel_state.get_context_parallel_group()
    if comm_type == "a2a+p2p":
        group = parallel_state.get_hierarchical_context_parallel_groups()
    tracker = tensor_parallel.get_cuda_rng_tracker
    return DotProductAttention(
        config.num_attention_heads,
        config.kv_channels,
        num_gqa_groups=config.num_query_groups,
        attention_dropout=layer.attention_dropout.p,
        attn_mask_type=layer.attn_mask_type.name,
        window_size=getattr(layer.scale_mask_softmax, "window_size", None),
        sequence_parallel=config.sequence_parallel,
        tp_size=config.tensor_model_parallel_size,
        get_rng_state_tracker=tracker if tracker().is_initialized() else None,
        tp_group=parallel_state.get_tensor_model_parallel_group(check_initialized=False),
        layer_number=layer.layer_number,
        cp_group=group if config.context_parallel_size > 1 else None,
        cp_comm_type=comm_type or "p2p",
        # Megatron divides the scores by the layer number, and multiplies again in float32.
        softmax_scale=layer.softmax_scale * (layer.scale_mask_softmax.scale or 1),
    )
