"""Ulysses context parallelism for the attention of transformers.

Every rank of a group processes the full batch up to the first layer of the text decoder and its
part of the sequence from there on. Around each attention, an all-to-all gives a rank the full
sequence for a part of the heads. Masks are those of transformers for the full sequence.
Heads need not divide by the ranks: the first ranks get one more.
Shapes: B batch, N heads, S sequence, D head size; s = S / ranks, n heads of a rank.
"""

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

from mindspeed.config import ConfigError
from mindspeed.parallel.context.exchange import Members
from mindspeed.parallel.context.layout import Layout
from mindspeed.parallel.context.ulysses import HeadSplit, to_heads, to_rows
from mindspeed_mm.models.fused_ops import depends_on_name, register_attention

PREFIX = "ulysses_"
PADDING = {"labels": -100}
"""Padding values of a batch's tensors; 0 for the others."""


class ContextParallel:
    """Splits every sequence of a model over a group of ranks."""

    def __init__(self, model: Any, group: ProcessGroup) -> None:
        """Enable context parallelism in the text decoder of a transformers model."""
        self.group = group
        self.size, self.rank = group.size(), group.rank()
        self._positions: torch.Tensor | None = None
        decoder = model.get_decoder()
        self._check(decoder)
        config = decoder.config
        if self.size == 1:
            return
        config._attn_implementation_internal = _wrap_attention(config._attn_implementation)
        for module in decoder.modules():
            module.context_parallel = self
        decoder.register_forward_pre_hook(self._split_visual_features, with_kwargs=True)
        for number, layer in enumerate(decoder.layers):
            hook = self._split_positions if number else self._split_sequence
            layer.register_forward_pre_hook(hook, with_kwargs=True)
            for part in layer.modules():
                if part is not layer and "position_ids" in signature(type(part).forward).parameters:
                    part.register_forward_pre_hook(self._split_position_ids, with_kwargs=True)

    def local(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this rank's part of a full sequence."""
        return tensor.chunk(self.size, dim)[self.rank]

    def padded(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Pad the sequences of a batch to a multiple of the group size."""
        length = batch["input_ids"].shape[1]
        padding = -length % self.size
        if not padding:
            return batch
        padded = dict(batch)
        for name in ("input_ids", "attention_mask", "labels", "mm_token_type_ids"):
            if batch.get(name) is not None:
                value = PADDING.get(name, 0)
                padded[name] = nn.functional.pad(batch[name], (0, padding), value=value)
        if (positions := batch.get("position_ids")) is not None:  # a packed sample of its own
            end = torch.arange(padding, device=positions.device, dtype=positions.dtype)
            padded["position_ids"] = torch.cat(
                [positions, end.expand(*positions.shape[:-1], padding)], dim=-1
            )
        return padded

    def attend(
        self, inner: Any, module: Any, qkv: tuple[Any, Any, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Attend to full sequences with a part of the heads; qkv are (B, N, s, D)."""
        query, key, _ = qkv
        layout = Layout.contiguous(query.shape[2] * self.size, self.size)
        members = Members(self.group, layout)
        heads = HeadSplit.of(query.shape[1], key.shape[1], self.size)
        # (B, N, s, D) becomes (B, n, S, D), and the output (B, S, n, D) becomes (B, s, N, D).
        rows = [t.permute(2, 0, 1, 3) for t in qkv]
        q, k, v = to_heads(rows, (heads.q, heads.k, heads.k), members)
        k, v = (heads.per_query_group(t, self.rank) for t in (k, v))
        if self._positions is not None and "position_ids" in kwargs:
            kwargs["position_ids"] = self._positions  # flash attention finds documents by them
        grouped = _GroupedHeads(module, q.shape[2] // k.shape[2])
        output, weights = inner(
            grouped, *(t.permute(1, 2, 0, 3) for t in (q, k, v)), *args, **kwargs
        )
        return to_rows(output.transpose(0, 1), heads.q, members).transpose(0, 1), weights

    def _split_sequence(self, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if args:
            args = (self.local(args[0]), *args[1:])
        else:
            kwargs = kwargs | {"hidden_states": self.local(kwargs["hidden_states"])}
        return self._split_positions(layer, args, kwargs)

    def _split_positions(self, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        local = {
            name: tree_map(partial(self.local, dim=-2), value)
            for name, value in kwargs.items()
            if name.startswith("position_embeddings") and value is not None
        }
        return args, kwargs | local

    def _split_position_ids(self, attention: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Keep the positions of this rank's rows, where an attention scales its queries by them."""
        self._positions = positions = kwargs.get("position_ids")
        if positions is None:
            return args, kwargs
        return args, kwargs | {"position_ids": self.local(positions, dim=-1)}

    def _split_visual_features(self, decoder: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Qwen3-VL adds visual features between layers: keep those of this rank's tokens."""
        mask = kwargs.get("visual_pos_masks")
        if mask is None:
            return args, kwargs
        is_local = torch.zeros_like(mask)
        self.local(is_local).fill_(True)
        features = kwargs["deepstack_visual_embeds"]
        kept = features and [layer[is_local[mask]] for layer in features]
        changed = {"visual_pos_masks": self.local(mask), "deepstack_visual_embeds": kept}
        return args, kwargs | changed

    def _check(self, decoder: Any) -> None:
        where, name = f"context_parallel_size={self.size}", type(decoder).__name__
        if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
            raise ConfigError(f"{where}: {name} has no `layers`: use 1")
        config = decoder.config
        heads = getattr(config, "num_attention_heads", 0)
        if heads < self.size:
            raise ConfigError(
                f"{where}: the text decoder has {heads} attention heads, fewer than ranks: use 1"
                + (f" to {heads}" if heads > 1 else "")
            )
        kinds = set(getattr(config, "layer_types", None) or ())
        unknown = kinds - {"full_attention", "sliding_attention"}
        if not unknown:
            unknown = {type(m).__name__ for m in decoder.modules() if _needs_full_sequence(m)}
        if unknown:
            raise ConfigError(f"{where}: layers of {min(unknown)} need the full sequence: use 1")


def _needs_full_sequence(module: nn.Module) -> bool:
    """Return whether a module computes more than attention from other rows of the sequence."""
    is_cross_attention = "cross_attention_states" in signature(type(module).forward).parameters
    return (
        isinstance(module, nn.Conv1d)
        or is_cross_attention
        or depends_on_name(type(module))  # it makes its own mask
    )


class _GroupedHeads:
    """An attention module with another number of query heads per key head."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _wrap_attention(inner_name: str) -> str:
    """Register an attention that wraps another in all-to-alls; return its name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if inner_name.startswith(PREFIX):
        return inner_name
    if inner_name not in ALL_ATTENTION_FUNCTIONS:
        raise ConfigError(
            f"context parallelism does not support attn_implementation: {inner_name}: use sdpa or "
            "flash_attention_2"
        )
    inner = ALL_ATTENTION_FUNCTIONS[inner_name]

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return module.context_parallel.attend(inner, module, (query, key, value), *args, **kwargs)

    return register_attention(PREFIX + inner_name, attend, inner_name)
