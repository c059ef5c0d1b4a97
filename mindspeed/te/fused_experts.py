"""Megatron's grouped SwiGLU experts with both GEMMs, the activation and the weighted sum as one.

Experts get the path when they are built. They take tokens with `ExpertRows` from a dispatcher that
leaves the gathering to them, or rows that are sorted by expert, with their number for each, from
any other. Code that is put into one of the linears later, a hook or an adapter, makes the GEMMs
Megatron's again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed.ops.expert_mlp.reference import ExpertRows, sorted_rows
from mindspeed.ops.module_hooks import (
    has_global_hooks,
    has_known_pre_hooks,
    is_untouched,
    run_forward_pre_hooks,
)
from mindspeed.ops.token_rows import gather_rows, spread_rows
from mindspeed.parallel.tensor.expert_mlp import expert_mlp
from mindspeed.te.pytorch.module.base import activation_dtype
from mindspeed.te.pytorch.module.grouped_linear import GroupedLinear

logger = logging.getLogger(__name__)


def wrap_experts_init(
    original: Callable[..., None],
    is_requested: bool,
    find_need: Callable[[Callable[[str], Any]], str | None],
) -> Callable[..., None]:
    """Choose the path of experts: `fused_linears` are the classes of their linears if fused.

    `find_need` names what the path needs and Megatron's arguments, which it reads by name, do not
    give. Experts that cannot be fused are reported where a user has asked for it.
    """
    warn_once = functools.cache(_warn)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        need = find_need(functools.partial(_argument, self.config)) or _find_linears_need(self)
        self.fused_linears = None if need else _classes(self)
        if need and is_requested:
            warn_once(need)

    return __init__


def _warn(need: str) -> None:
    logger.warning("--moe-fused-experts has no effect on experts of this model: it needs %s", need)


def _argument(config: Any, name: str) -> Any:
    """Return what Megatron's config has made of one of its arguments."""
    if name == "swiglu":
        return config.gated_linear_unit and config.activation_func is F.silu
    return getattr(config, name, None)


def _find_linears_need(experts: Any) -> str | None:
    is_plain = all(map(_is_plain_linear, _linears(experts)))
    return None if is_plain else "linears of the Transformer Engine socket that have no bias"


def wrap_experts_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run experts that were built for it as one path; others stay Megatron's."""

    @functools.wraps(original)
    def forward(
        self: Any,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor | Sequence[int] | ExpertRows,
        permuted_probs: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        x, counts, probs = permuted_local_hidden_states, tokens_per_expert, permuted_probs
        if _has_buffers(*args, **kwargs):
            return original(self, x, counts, probs, *args, **kwargs)
        if _is_as_built(self) and len(x) and not torch.compiler.is_compiling():
            rows = counts if isinstance(counts, ExpertRows) else _numbers(x, counts)
            return _forward(self, x, rows, probs.flatten()), None
        if isinstance(counts, ExpertRows):
            return _apart(functools.partial(original, self), x, counts, probs), None
        return original(self, x, counts, probs)

    return forward


def _has_buffers(*buffers: Tensor | None, **by_name: Tensor | None) -> bool:
    """Return whether results are to be written into buffers, as Megatron 0.19 may ask for."""
    return any(each is not None for each in (*buffers, *by_name.values()))


def _forward(experts: Any, x: Tensor, rows: ExpertRows, probs: Tensor) -> Tensor:
    fc1, fc2 = experts.linear_fc1, experts.linear_fc2
    counts = rows.cu_seqlens.diff()
    for linear in (fc1, fc2):
        run_forward_pre_hooks(linear, x, counts)
    x = x.to(activation_dtype(x, fc1.weight0))
    return expert_mlp(x, probs, rows, fc1.matrices(), fc2.matrices())


def _apart(run: Callable[..., Any], x: Tensor, rows: ExpertRows, probs: Tensor) -> Tensor:
    """Copy the tokens to their rows, run Megatron's experts, add the rows of each token up."""
    gathered = spread_rows(x, rows.row_ids, len(rows.row_ids), rows.starts)
    out, _ = run(gathered, rows.cu_seqlens.diff(), probs)
    total: Tensor = gather_rows(out, rows.row_ids, None, rows.starts)
    return total


def _numbers(x: Tensor, counts: Tensor | Sequence[int]) -> ExpertRows:
    return sorted_rows(torch.as_tensor(counts).to(x.device, non_blocking=True), len(x))


def _is_plain_linear(module: nn.Module) -> bool:
    return (
        isinstance(module, GroupedLinear)
        and type(module).forward in _socket_forwards()
        and not module.use_bias
    )


@functools.cache
def _socket_forwards() -> frozenset[Any]:
    """Return the forward methods of Megatron's classes around this package's grouped linear."""
    from megatron.core.extensions import transformer_engine as extension

    names = ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear")
    classes = (getattr(extension, name, None) for name in names)
    return frozenset(
        one.forward for one in classes if isinstance(one, type) and issubclass(one, GroupedLinear)
    )


def _is_as_built(experts: Any) -> bool:
    """Return whether experts are fused and nothing since then sees the tensors between linears."""
    return (
        getattr(experts, "fused_linears", None) == _classes(experts)
        and all(is_untouched(each) and has_known_pre_hooks(each) for each in _linears(experts))
        and not has_global_hooks()
    )


def _linears(experts: Any) -> tuple[nn.Module, nn.Module]:
    return experts.linear_fc1, experts.linear_fc2


def _classes(experts: Any) -> tuple[type, type]:
    return type(experts.linear_fc1), type(experts.linear_fc2)
