"""The core attention module that Megatron's layer specs plug in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mindspeed.distributed.context_rules import check_dropout
from mindspeed.ops.fusion_attention import flash4
from mindspeed.ops.packed_batch import describe
from mindspeed.parallel.context.attention import ContextParallel
from mindspeed.parallel.context.whole_documents import DOCUMENT_LAYOUTS
from mindspeed.te.pytorch.attention.core import (
    Documents,
    Softmax,
    attend_batch,
    attend_documents,
    largest_in_batch,
    largest_in_documents,
)
from mindspeed.te.pytorch.attention.masks import MaskRule, MaskTensors, Window, alibi_bias
from mindspeed.te.pytorch.attention.shared_prefixes import KeyRows
from mindspeed.te.pytorch.attention.split_sequence import SplitSequence
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
        self.alibi_slopes: Tensor | None = None  # of this rank's heads, where all calls use ALiBi
        self.reads_mask = False  # whether causal layers take their mask tensor into account
        self.cp_window_size = 1  # ranks of an inner ring, of a double ring
        self.cp_document_layout = "zigzag"  # how packed documents are shared by ranks
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        if in_force == flash4.CAUSAL and not attention_dropout:
            groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
            self._prepare(num_attention_heads // tp_size, max(groups // tp_size, 1), head_size)

    def _prepare(self, heads: int, groups: int, head_size: int) -> None:
        """Start to compile kernels: Megatron's subclass has its config by now, with the dtype."""
        dtype = getattr(getattr(self, "config", None), "params_dtype", None)
        if dtype is not None:
            flash4.prepare(dtype, heads, groups, head_size)

    def set_context_parallel_group(
        self,
        cp_group: ProcessGroup | list[ProcessGroup] | None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str | None = "p2p",
    ) -> None:
        """Split the sequence over another group, two groups for a2a+p2p, or none.

        `cp_global_ranks` and `cp_stream` are not needed: the group knows its ranks, and messages
        travel on streams of its own.
        """
        self.cp_group = cp_group
        self.cp_global_ranks = cp_global_ranks
        self.cp_stream = cp_stream
        self.cp_comm_type = "p2p" if cp_comm_type is None else cp_comm_type

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
        alibi_slopes: Tensor | None = None,
        pad_between_seqs: bool | None = None,
        num_splits: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return (S, B, N * H), (B, S, N * H) or (T, N * H), following the format of the inputs.

        With `return_max_logit` the largest score of each head, (N,), comes second.

        `attention_mask` is True where a key is hidden. Packed sequences (thd) come with cumulative
        lengths, and with padded ones where there is padding between documents. `alibi_slopes` (N,)
        come with core_attention_bias_type="alibi". `max_seqlen_*`, `pad_between_seqs` and
        `num_splits` are hints to kernels and change no number.

        With context parallelism the tensors have the rows of this rank, in zigzag order, or packed
        documents as `cp_document_layout` says; a mask and a bias have all columns, and cumulative
        lengths are those of the whole documents.
        """
        layout = self.qkv_format if qkv_format is None else qkv_format
        if layout not in FORMATS:
            raise ValueError(f"qkv_format={layout} is not known: use {', '.join(FORMATS)}")
        rule = MaskRule.of(
            self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            self._given_window if window_size is None else window_size,
        )
        bias = _scaled_bias(core_attention_bias_type, core_attention_bias, self.softmax_scale)
        slopes = _slopes(core_attention_bias_type, alibi_slopes, self.alibi_slopes)
        context = self._context()
        largest: Callable[..., Tensor]
        if layout == "thd":
            if cu_seqlens_q is None or cu_seqlens_kv is None:
                raise ValueError("qkv_format=thd needs cu_seqlens_q and cu_seqlens_kv")
            _check_packed(rule, bias)
            run, largest = self._of_documents(
                context,
                (cu_seqlens_q, cu_seqlens_q_padded),
                (cu_seqlens_kv, cu_seqlens_kv_padded),
                rule,
                slopes,
            )
        else:
            if layout == "bshd":
                query_layer, key_layer, value_layer = (
                    x.transpose(0, 1) for x in (query_layer, key_layer, value_layer)
                )
            rule = self._general(rule, attention_mask)
            added = {"mask": attention_mask, "bias": bias}
            lengths = query_layer.shape[0], key_layer.shape[0]
            run, largest = self._of_batch(context, lengths, rule, slopes, **added)
        out = self._run(run, checkpoint_core_attention, query_layer, key_layer, value_layer)
        out = out.transpose(0, 1) if layout == "bshd" else out
        return (out, largest(query_layer, key_layer)) if self.return_max_logit else out

    def _of_documents(
        self,
        context: ContextParallel,
        of_q: tuple[Tensor, Tensor | None],
        of_k: tuple[Tensor, Tensor | None],
        rule: MaskRule,
        slopes: Tensor | None,
    ) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """Return what attends packed documents, and what finds the largest score."""
        scale = self.softmax_scale
        if slopes is not None and self._softmax().dropout:
            raise ValueError("packed documents with alibi_slopes take no dropout: use 0")
        shared = describe(of_k[0]).key_rows
        if shared is not None:
            _check_shared(context, slopes)
            rule = rule.bottom_right()
        if context.size > 1 or slopes is not None:
            make_layout = DOCUMENT_LAYOUTS[self.cp_document_layout]
            split = SplitSequence.of_documents(
                context, of_q, of_k, rule, scale, slopes=slopes, make_layout=make_layout
            )
            return split.attend, split.largest
        documents: Any = {"of_q": Documents.of(*of_q), "of_k": Documents.of(*of_k)}
        run: Callable[..., Tensor]
        largest: Callable[..., Tensor]
        run = partial(attend_documents, rule=rule, softmax=self._softmax(), **documents)
        largest = partial(largest_in_documents, rule=rule, scale=scale, **documents)
        if shared is not None:
            run, largest = _with_keys(run, shared), _with_keys(largest, shared)
        return self._with_random_state(run), largest

    def _of_batch(
        self,
        context: ContextParallel,
        lengths: tuple[int, int],
        rule: MaskRule,
        slopes: Tensor | None,
        **added: Any,
    ) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """Return what attends (S, B, N, H) tensors, and what finds the largest score."""
        scale = self.softmax_scale
        if context.size > 1:
            split = SplitSequence.of_batch(context, lengths, rule, scale, slopes=slopes, **added)
            return split.attend, split.largest
        if slopes is not None:
            alibi = alibi_bias(slopes, *lengths)
            added["bias"] = alibi if added["bias"] is None else added["bias"] + alibi
        run = partial(attend_batch, rule=rule, softmax=self._softmax(), **added)
        return self._with_random_state(run), partial(
            largest_in_batch, rule=rule, scale=scale, **added
        )

    def _with_random_state(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*inputs: Tensor) -> Tensor:
            with self._random_state():
                return attend(*inputs)

        return run

    def _general(self, rule: MaskRule, mask: MaskTensors) -> MaskRule:
        """Let a causal layer read its mask where it was asked to, as documents need it."""
        if self.reads_mask and mask is not None and rule.kind == "causal":
            return MaskRule("arbitrary", rule.window)
        return rule

    def _context(self) -> ContextParallel:
        groups = self.cp_group if isinstance(self.cp_group, (list, tuple)) else [self.cp_group]
        if all(group is None or group.size() == 1 for group in groups):
            return ContextParallel()
        context = ContextParallel.of(self.cp_comm_type, self.cp_group, self.cp_window_size)
        check_dropout(self._softmax().dropout, context.size, "attention_dropout=")
        return context

    def _run(self, attend: Callable[..., Tensor], recompute: bool, *inputs: Tensor) -> Tensor:
        if not recompute:
            return attend(*inputs)
        return checkpoint(
            attend,
            *inputs,
            get_rng_state_tracker=self.get_rng_state_tracker,
            tp_group=self.tp_group,
        )

    def _softmax(self) -> Softmax:
        return Softmax(self.softmax_scale, self.attention_dropout if self.training else 0.0)

    def _random_state(self) -> AbstractContextManager[None]:
        # Each tensor-parallel rank drops other elements: its heads are other heads.
        if self.sequence_parallel or self.get_rng_state_tracker is None:
            return nullcontext()
        return self.get_rng_state_tracker().fork() if self._softmax().dropout else nullcontext()

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


def _check_shared(context: ContextParallel, slopes: Tensor | None) -> None:
    if context.size > 1 or slopes is not None:
        raise ValueError("documents with a shared prefix take no context parallelism and no ALiBi")


def _with_keys(attend: Callable[..., Tensor], rows: KeyRows) -> Callable[..., Tensor]:
    """Let keys, and values if there are any, be there for every document that begins with them."""

    def run(q: Tensor, *keys: Tensor) -> Tensor:
        return attend(q, *map(rows.spread, keys))

    return run


def _slopes(kind: str, slopes: Tensor | None, of_layer: Tensor | None) -> Tensor | None:
    if kind != "alibi":
        return of_layer
    if slopes is None:
        raise ValueError("core_attention_bias_type=alibi needs alibi_slopes, one for each head")
    return slopes


def _scaled_bias(kind: str, bias: Tensor | None, scale: float) -> Tensor | None:
    if kind in ("no_bias", "alibi"):
        return None
    if kind not in ("post_scale_bias", "pre_scale_bias") or bias is None:
        raise ValueError(
            f"core_attention_bias_type={kind}: use no_bias, alibi, or pre_scale_bias / "
            "post_scale_bias together with core_attention_bias"
        )
    return bias * scale if kind == "pre_scale_bias" else bias


def __getattr__(name: str) -> Any:
    # ms-swift asks for the attention that Megatron's TE spec uses, by this name. Megatron imports
    # this module first, so the class is looked up at use.
    if name != "MindSpeedTEDotProductAttention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return TEDotProductAttention
