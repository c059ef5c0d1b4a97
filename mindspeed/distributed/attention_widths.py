"""Widths of attention, from Megatron's arguments under Megatron's names; pure arithmetic."""

from collections.abc import Mapping
from typing import Any


def attention_widths(arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the widths of all query heads, of all key heads, and of attention's output.

    What is missing or None has Megatron's default.
    """

    def get(name: str, default: int = 0) -> int:
        value = arguments.get(name)
        return default if value is None else int(value)

    heads = get("num_attention_heads")
    if get("multi_latent_attention"):
        query = heads * (get("qk_head_dim", 128) + get("qk_pos_emb_head_dim", 64))
        return query, query, heads * get("v_head_dim", 128)
    head = get("kv_channels") or get("hidden_size") // heads
    groups = get("num_query_groups") if get("group_query_attention") else 0
    return heads * head, (groups or heads) * head, heads * head
