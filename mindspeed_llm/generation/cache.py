"""Megatron's inference context, with keys that are turned to their positions before they are kept.

Megatron keeps keys as they are and turns all of them again for every token. Rotating only the new
ones makes a step cost one token, however much was read before.
"""

from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config as yarn_factor,
)


class Cache(StaticInferenceContext):
    """The keys and values of what was read, of all layers and rows."""

    def __init__(self, rows: int, length: int) -> None:
        super().__init__(rows, length)
        self._turns: tuple[torch.Tensor, torch.Tensor] | None = None

    def advance(self, count: int) -> None:
        """Count tokens that all layers have read."""
        self.increment_sequence_len_offset(count)
        self.enable_decode_mode()
        self._turns = None

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows, in this order; a row may be there several times."""
        used = self.sequence_len_offset
        for layer, memories in self.key_value_memory_dict.items():
            chosen = tuple(_select(memory, rows, used) for memory in memories)
            self.key_value_memory_dict[layer] = chosen

    def turns(self, angles: torch.Tensor, factor: float, like: torch.Tensor) -> Any:
        """Return the cosine and the signed sine for the tokens being read, alike in all layers."""
        if self._turns is None:
            begin = self.sequence_len_offset
            angles = angles[begin : begin + len(like)]
            half = angles.shape[-1] // 2
            cosine, sine = angles.cos() * factor, angles.sin() * factor
            sine[..., :half].neg_()
            self._turns = cosine.to(like.dtype), sine.to(like.dtype)
        return self._turns


def keep_turned_keys(attention: Any) -> None:
    """Let attention turn keys before it keeps them; latent attention does so by itself."""
    if attention.config.multi_latent_attention:
        return
    keep = attention._adjust_key_value_for_inference
    factor = yarn_factor(attention.config)

    def turn_and_keep(
        cache: Cache | None, query: Any, key: Any, value: Any, angles: Any = None, *others: Any
    ) -> Any:
        if cache is not None and angles is not None:
            cosine, sine = cache.turns(angles[0], factor, key)
            both = torch.cat([query, key], dim=2)
            both = torch.addcmul(both * cosine, both.roll(both.shape[-1] // 2, -1), sine)
            query, key = both.split([query.shape[2], key.shape[2]], dim=2)
            angles = None  # nothing is left for Megatron to turn
        return keep(cache, query, key, value, angles, *others)

    attention._adjust_key_value_for_inference = turn_and_keep


def _select(memory: torch.Tensor, rows: torch.Tensor, used: int) -> torch.Tensor:
    """Copy rows of a layer's memory; what is not filled yet needs no copy."""
    chosen = memory.new_empty(memory.shape[0], len(rows), *memory.shape[2:])
    chosen[:used] = memory[:used, rows]
    return chosen
