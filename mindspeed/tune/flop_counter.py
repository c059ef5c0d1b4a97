"""Count the floating-point operations of a piece of code, recomputed ones separately.

A GEMM of (m, k) and (k, n) is 2mnk. Attention is its two GEMMs over the pairs of query and key that
it computes: all of them, or half where it is causal, with as many queries as keys. Its backward is
four GEMMs; the scores that a flash kernel recomputes there are not counted, so that the number does
not depend on the kernel.
Everything else (norms, activations, the optimizer) is below 1 % and is left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

Arguments = Mapping[str, Any]
Formula = Callable[[Arguments], float]
CAUSAL_SPARSE_MODES = (2, 3)  # of torch_npu: aligned left-up and right-down

_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


@dataclass(frozen=True)
class Flops:
    """Operations of one step: those of the model, and those the device executed."""

    model: float
    hardware: float
    """Including recomputed activations."""


class FlopCounter(TorchDispatchMode):
    """Counts the operations of a block, forward and backward, on this thread and autograd's."""

    def __init__(self) -> None:
        super().__init__()
        self._model = 0.0
        self._recomputed = 0.0

    @property
    def flops(self) -> Flops:
        """The operations counted so far."""
        return Flops(self._model, self._model + self._recomputed)

    def add(self, count: float) -> None:
        """Add operations, as recomputed inside a recompute."""
        if _recomputing.get():
            self._recomputed += count
        else:
            self._model += count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count one operator, or those it is composed of."""
        kwargs = kwargs or {}
        formula = FORMULAS.get(_name(func))
        if formula is not None:
            self.add(formula(_by_name(func, args, kwargs)))
        elif isinstance(func, torch._ops.OpOverload):
            with self:  # an operator that is only a composition of others
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def wrap_grouped_kernel(original: Callable[..., None]) -> Callable[..., None]:
    """Count a grouped GEMM kernel, which is no operator of torch."""

    @functools.wraps(original)
    def launch(x: torch.Tensor, dy: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        # Modes follow autograd to its own threads; a thread-local variable would not.
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, FlopCounter):
                mode.add(2 * x.numel() * dy.shape[-1])
        original(x, dy, *args, **kwargs)

    return launch


def marks_recompute(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its operations count as recomputed when backward calls it."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:  # not inside a backward pass: the first run
            return function(*args, **kwargs)
        with _recomputed():
            return function(*args, **kwargs)

    return marked


@contextmanager
def _recomputed() -> Iterator[None]:
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


def _name(func: Any) -> str:
    """Return the schema name of an operator; the in-place variant (`addmm_`) has the same."""
    schema = getattr(func, "_schema", None)
    return "" if schema is None else schema.name.removesuffix("_")


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the given arguments by their schema names."""
    return {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs


def matmul(left: str, right: str) -> Formula:
    """Return the formula of a plain or batched GEMM of two arguments."""
    return lambda a: 2 * a[left].numel() * a[right].shape[-1]


def grouped_matmul(a: Arguments) -> float:
    """Count a grouped GEMM of rows, columns or inner dimensions (`torch._grouped_mm`)."""
    left, right = a["self"], a["mat2"]
    if left.dim() == 3 and right.dim() == 2:  # groups of columns: one matrix per column
        return 2 * math.prod(left.shape[1:]) * right.shape[-1]
    return 2 * left.numel() * right.shape[-1]


def attention(a: Arguments) -> float:
    """Count scaled_dot_product_attention on (batch, heads, tokens, size)."""
    query, key, value = a["query"], a["key"], a["value"]
    pairs = query.shape[0] * query.shape[-2] * key.shape[-2]
    return _attention(pairs, query.shape[1], query.shape[-1] + value.shape[-1], _is_causal(a))


def packed_attention(a: Arguments) -> float:
    """Count attention on (batch, tokens, heads, size), or on packed sequences."""
    query, key, value = a["query"], a["key"], a["value"]
    bounds = [_first(a, "cum_seq_q", "cu_seqlens_q"), _first(a, "cum_seq_k", "cu_seqlens_k")]
    if None in bounds:
        lengths, batch = [(query.shape[1], key.shape[1])], query.shape[0]
    else:
        each = [torch.diff(bound.cpu().long()).tolist() for bound in bounds]
        lengths, batch = list(zip(*each)), 1
    pairs = batch * sum(_pairs(q, k, _is_causal(a)) for q, k in lengths)
    return _attention(pairs, query.shape[-2], query.shape[-1] + value.shape[-1], False)


def backward(forward: Formula) -> Formula:
    """Return the formula of a backward: two GEMMs for each one of the forward."""
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
    """Count torch_npu's grouped GEMM, on lists of tensors or on one split by `group_list`."""
    pairs = zip(a["x"], a["weight"])
    return sum(grouped_matmul({"self": x, "mat2": weight}) for x, weight in pairs)


def _pairs(queries: int, keys: int, is_causal: bool) -> float:
    """Count the keys that queries see; causal ones with the last query at the last key."""
    if not is_causal:
        return queries * keys
    seen = min(queries, keys)
    return seen * keys - seen * seen / 2


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
    "aten::mm": matmul("self", "mat2"),
    "aten::bmm": matmul("self", "mat2"),
    "aten::mv": lambda a: 2 * a["self"].numel(),
    "aten::addmm": matmul("mat1", "mat2"),
    "aten::_addmm_activation": matmul("mat1", "mat2"),
    "aten::addbmm": matmul("batch1", "batch2"),
    "aten::baddbmm": matmul("batch1", "batch2"),
    "aten::_int_mm": matmul("self", "mat2"),
    "aten::_scaled_mm": matmul("self", "mat2"),
    "aten::_grouped_mm": grouped_matmul,
    "aten::_scaled_grouped_mm": grouped_matmul,
    **{f"aten::_scaled_dot_product_{name}": attention for name in _SDPA},
    **{f"aten::_scaled_dot_product_{name}_backward": backward(attention) for name in _SDPA},
    **{f"aten::_{name}_forward": packed_attention for name in _PACKED},
    **{f"aten::_{name}_backward": backward(packed_attention) for name in _PACKED},
    "mindspeed::grouped_rows": matmul("x", "weight"),
    "mindspeed::grouped_outer": matmul("x", "y"),
    "npu::npu_fusion_attention": npu_attention,
    "npu::npu_fusion_attention_v2": npu_attention,
    "npu::npu_fusion_attention_grad": backward(npu_attention),
    "npu::npu_fusion_attention_grad_v2": backward(npu_attention),
    "npu::npu_grouped_matmul": npu_grouped_matmul,
    "npu::npu_grouped_matmul_add": matmul("x", "weight"),
}
"""The operators that compute GEMMs, by schema name."""
