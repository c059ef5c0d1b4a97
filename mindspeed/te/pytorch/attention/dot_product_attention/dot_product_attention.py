"""The core attention module that Megatron's layer specs plug in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mindspeed.te.pytorch.attention.core import (
    Documents,
    Softmax,
    attend_batch,
    attend_documents,
    largest_in_batch,
    largest_in_documents,
)
from mindspeed.te.pytorch.attention.masks import MaskRule, MaskTensors, Window
from mindspeed.te.pytorch.distributed import checkpoint

FORMATS = ("sbhd", "bshd", "thd")


class DotProductAttention(nn.Module):
    """softmax(q k^T * scale + bias) v on this rank's heads, without parameters of its own.

    Args:
        kv_channels: head size, or (of queries and keys, of values) where they differ.
        num_gqa_groups: key / value heads over all ranks, where they are fewer than query heads.
        window_size: (left, right) neighbours a query sees, -1 for all.
        sequence_parallel: the caller has already entered the tensor-parallel random state.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        *,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: ProcessGroup | list[ProcessGroup] | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:
        super().__init__()
        _check_heads(num_attention_heads, num_gqa_groups, tp_size)
        _check_softmax(softmax_type)
        head_size = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = head_size**-0.5 if softmax_scale is None else softmax_scale
        self.attention_dropout = attention_dropout
        self.attention_type = attention_type
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        in_force = MaskRule.of(attn_mask_type, window_size).window
        # Megatron compares it with what it gave, which may be a list.
        as_given = window_size is not None and tuple(window_size) == in_force
        self.window_size = window_size if as_given else in_force
        self._given_window = window_size  # a call may come with a mask type that opens it again
        self.sequence_parallel = sequence_parallel
        self.get_rng_state_tracker = get_rng_state_tracker
        self.tp_group = tp_group
        self.layer_number = layer_number
        self.return_max_logit = return_max_logit
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self._check_context_parallel()

    def set_context_parallel_group(
        self,
        cp_group: ProcessGroup | list[ProcessGroup] | None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Remember the group over which the sequence is split."""
        self.cp_group = cp_group
        self.cp_global_ranks = cp_global_ranks
        self.cp_stream = cp_stream
        self.cp_comm_type = cp_comm_type

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: MaskTensors = None,
        *,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | Tensor | None = None,
        max_seqlen_kv: int | Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        pad_between_seqs: bool | None = None,
        num_splits: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return (S, B, N * H), (B, S, N * H) or (T, N * H), following the format of the inputs.

        With `return_max_logit` the largest score of each head, (N,), comes second.

        `attention_mask` is True where a key is hidden. Packed sequences (thd) come with cumulative
        lengths, and with padded ones where there is padding between documents. `max_seqlen_*`,
        `pad_between_seqs` and `num_splits` are hints to kernels and change no number.
        """
        self._check_context_parallel()
        layout = self.qkv_format if qkv_format is None else qkv_format
        if layout not in FORMATS:
            raise ValueError(f"qkv_format={layout} is not known: use {', '.join(FORMATS)}")
        rule = MaskRule.of(
            self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            self._given_window if window_size is None else window_size,
        )
        largest: Callable[..., Tensor]
        bias = _scaled_bias(core_attention_bias_type, core_attention_bias, self.softmax_scale)
        if layout == "thd":
            if cu_seqlens_q is None or cu_seqlens_kv is None:
                raise ValueError("qkv_format=thd needs cu_seqlens_q and cu_seqlens_kv")
            _check_packed(rule, bias)
            of_q = Documents.of(cu_seqlens_q, cu_seqlens_q_padded)
            of_k = Documents.of(cu_seqlens_kv, cu_seqlens_kv_padded)
            run = partial(self._packed, rule=rule, of_q=of_q, of_k=of_k)
            largest = partial(largest_in_documents, rule=rule, of_q=of_q, of_k=of_k)
        else:
            run = partial(self._batched, rule=rule, layout=layout, mask=attention_mask, bias=bias)
            largest = partial(largest_in_batch, rule=rule, mask=attention_mask, bias=bias)
        out = self._run(run, checkpoint_core_attention, query_layer, key_layer, value_layer)
        if not self.return_max_logit:
            return out
        if layout == "bshd":
            query_layer, key_layer = query_layer.transpose(0, 1), key_layer.transpose(0, 1)
        return out, largest(query_layer, key_layer, scale=self.softmax_scale)

    def _run(self, attend: Callable[..., Tensor], recompute: bool, *inputs: Tensor) -> Tensor:
        if not recompute:
            return attend(*inputs)
        return checkpoint(
            attend,
            *inputs,
            get_rng_state_tracker=self.get_rng_state_tracker,
            tp_group=self.tp_group,
        )

    def _batched(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rule: MaskRule,
        layout: str,
        mask: MaskTensors,
        bias: Tensor | None,
    ) -> Tensor:
        if layout == "bshd":
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        with self._random_state():
            out = attend_batch(q, k, v, rule, self._softmax(), mask=mask, bias=bias)
        return out.transpose(0, 1) if layout == "bshd" else out

    def _packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rule: MaskRule,
        of_q: Documents,
        of_k: Documents,
    ) -> Tensor:
        with self._random_state():
            return attend_documents(q, k, v, rule, self._softmax(), of_q=of_q, of_k=of_k)

    def _softmax(self) -> Softmax:
        return Softmax(self.softmax_scale, self.attention_dropout if self.training else 0.0)

    def _random_state(self) -> AbstractContextManager[None]:
        # Each tensor-parallel rank drops other elements: its heads are other heads.
        if self.sequence_parallel or self.get_rng_state_tracker is None:
            return nullcontext()
        return self.get_rng_state_tracker().fork() if self._softmax().dropout else nullcontext()

    def _check_context_parallel(self) -> None:
        groups = self.cp_group if isinstance(self.cp_group, (list, tuple)) else [self.cp_group]
        size = max(1 if group is None else group.size() for group in groups)
        if size > 1:
            raise RuntimeError(
                f"context_parallel_size={size}: attention over a split sequence comes in a later "
                "release of mindspeed. Use context_parallel_size=1"
            )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Checkpoints of NVIDIA's Transformer Engine carry FP8 state here, even when it is empty.
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _check_heads(heads: int, groups: int | None, tp_size: int) -> None:
    groups = heads if groups is None else groups
    if heads % groups or heads % tp_size or groups % tp_size:
        raise ValueError(
            f"num_attention_heads={heads}, num_gqa_groups={groups}, tp_size={tp_size}: "
            "the groups must divide the heads, and tp_size must divide both"
        )


def _check_softmax(softmax_type: str) -> None:
    if softmax_type != "vanilla":
        raise ValueError(f"softmax_type={softmax_type} is not supported: use vanilla")


def _check_packed(rule: MaskRule, bias: Tensor | None) -> None:
    if bias is not None or rule.kind == "arbitrary":
        raise ValueError("qkv_format=thd takes neither a bias nor attn_mask_type=arbitrary")


def _scaled_bias(kind: str, bias: Tensor | None, scale: float) -> Tensor | None:
    if kind == "no_bias":
        return None
    if kind not in ("post_scale_bias", "pre_scale_bias") or bias is None:
        raise ValueError(
            f"core_attention_bias_type={kind}: use no_bias, or pre_scale_bias / post_scale_bias "
            "together with core_attention_bias"
        )
    return bias * scale if kind == "pre_scale_bias" else bias


def __getattr__(name: str) -> Any:
    # ms-swift asks for the attention that Megatron's TE spec uses, by this name. Megatron imports
    # this module first, so the class is looked up at use.
    if name != "MindSpeedTEDotProductAttention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return TEDotProductAttention
