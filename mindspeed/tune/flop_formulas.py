"""How many floating-point operations an operator of torch does, from the shapes it is called with.

A product of (m, k) and (k, n) is 2mnk. Attention is its two products over the pairs of query and
key that it computes: all of them, or half where it is causal. Its backward is four products; the
scores that a flash kernel computes once more there are not counted, so that the number does not
depend on the kernel. Everything else (norms, activations, the optimizer) is below 1 % and is left
out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Arguments = Mapping[str, Any]
Formula = Callable[[Arguments], float]
CAUSAL_SPARSE_MODES = (2, 3)  # of torch_npu: aligned left-up and right-down


def product(left: str, right: str) -> Formula:
    """Return the formula of a plain or batched product of two arguments."""
    return lambda a: 2 * a[left].numel() * a[right].shape[-1]


def grouped_product(a: Arguments) -> float:
    """Count products of groups of rows, columns or inner dimensions (`torch._grouped_mm`)."""
    left, right = a["self"], a["mat2"]
    if left.dim() == 3 and right.dim() == 2:  # groups of columns: every column meets one matrix
        return 2 * math.prod(left.shape[1:]) * right.shape[-1]
    return 2 * left.numel() * right.shape[-1]


def attention(a: Arguments) -> float:
    """Count scaled_dot_product_attention on (batch, heads, tokens, size)."""
    query, key, value = a["query"], a["key"], a["value"]
    pairs = query.shape[0] * query.shape[-2] * key.shape[-2]
    return _attention(pairs, query.shape[1], query.shape[-1] + value.shape[-1], _is_causal(a))


def packed_attention(a: Arguments) -> float:
    """Count attention on (batch, tokens, heads, size), or on sequences one after the other."""
    query, key, value = a["query"], a["key"], a["value"]
    bounds = [_first(a, "cum_seq_q", "cu_seqlens_q"), _first(a, "cum_seq_k", "cu_seqlens_k")]
    if None in bounds:
        pairs = query.shape[0] * query.shape[1] * key.shape[1]
    else:
        lengths = [torch.diff(bound.cpu().long()) for bound in bounds]
        pairs = int((lengths[0] * lengths[1]).sum())
    return _attention(pairs, query.shape[-2], query.shape[-1] + value.shape[-1], _is_causal(a))


def twice(forward: Formula) -> Formula:
    """Return the formula of a backward: two products for each one of the forward."""
    return lambda a: 2 * forward(a)


def npu_attention(a: Arguments) -> float:
    """Count torch_npu's fused attention in any of its layouts."""
    query, key = a["query"], a["key"]
    value = a["value"]
    layout, heads = a["input_layout"], a["head_num"]
    if layout == "TND":
        lengths = [_lengths(a["actual_seq_qlen"]), _lengths(a["actual_seq_kvlen"])]
        pairs = sum(q * k for q, k in zip(*lengths))
    else:
        batch, tokens = layout.index("B"), layout.index("S")
        pairs = query.shape[batch] * query.shape[tokens] * key.shape[tokens]
    size = query.shape[-1] if "D" in layout else query.shape[-1] // heads
    value_size = size * value.shape[-1] // key.shape[-1]
    is_causal = a.get("sparse_mode", 0) in CAUSAL_SPARSE_MODES
    return _attention(pairs, heads, size + value_size, is_causal)


def npu_grouped_matmul(a: Arguments) -> float:
    """Count torch_npu's grouped product, on lists of tensors or on one split by `group_list`."""
    pairs = zip(a["x"], a["weight"])
    return sum(grouped_product({"self": x, "mat2": weight}) for x, weight in pairs)


def _attention(pairs: float, heads: int, sizes: int, is_causal: bool) -> float:
    return 2 * pairs * heads * sizes / (2 if is_causal else 1)


def _is_causal(a: Arguments) -> bool:
    return bool(a.get("is_causal") or a.get("custom_mask_type"))


def _first(a: Arguments, *names: str) -> Any:
    return next((a[name] for name in names if a.get(name) is not None), None)


def _lengths(ends: Any) -> list[int]:
    ends = [int(end) for end in ends]
    return [end - start for start, end in zip([0, *ends], ends)]


_SDPA = ("flash_attention", "cudnn_attention", "efficient_attention", "flash_attention_for_cpu")
_PACKED = ("flash_attention", "cudnn_attention", "efficient_attention")

FORMULAS: dict[str, Formula] = {
    "aten::mm": product("self", "mat2"),
    "aten::bmm": product("self", "mat2"),
    "aten::mv": lambda a: 2 * a["self"].numel(),
    "aten::addmm": product("mat1", "mat2"),
    "aten::_addmm_activation": product("mat1", "mat2"),
    "aten::addbmm": product("batch1", "batch2"),
    "aten::baddbmm": product("batch1", "batch2"),
    "aten::_int_mm": product("self", "mat2"),
    "aten::_scaled_mm": product("self", "mat2"),
    "aten::_grouped_mm": grouped_product,
    "aten::_scaled_grouped_mm": grouped_product,
    **{f"aten::_scaled_dot_product_{name}": attention for name in _SDPA},
    **{f"aten::_scaled_dot_product_{name}_backward": twice(attention) for name in _SDPA},
    **{f"aten::_{name}_forward": packed_attention for name in _PACKED},
    **{f"aten::_{name}_backward": twice(packed_attention) for name in _PACKED},
    "mindspeed::grouped_rows": product("x", "weight"),
    "mindspeed::grouped_outer": product("x", "y"),
    "npu::npu_fusion_attention": npu_attention,
    "npu::npu_fusion_attention_v2": npu_attention,
    "npu::npu_fusion_attention_grad": twice(npu_attention),
    "npu::npu_fusion_attention_grad_v2": twice(npu_attention),
    "npu::npu_grouped_matmul": npu_grouped_matmul,
    "npu::npu_grouped_matmul_add": product("x", "weight"),
}
"""The operators that multiply matrices, by the name of their schema."""
