"""A residual sum and the norm that reads it in one kernel, forward and backward.

A layer of Megatron adds its residual, and another module normalises the sum. Here the sum knows
that module: it computes both, and notes the norm's output on the sum, where the module finds it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_NOTE = "normed_ahead"
# What Megatron may recompute without entering a norm a second time.
_HARMLESS = {"core_attn"}
# Options of Megatron under which a sum does not reach the next module as the tensor it was.
_HARMFUL = (
    "cpu_offloading",
    "fine_grained_activation_offloading",
    "overlap_moe_expert_parallel_comm",
    "enable_cuda_graph",
    "external_cuda_graph",
)

# What torch's checkpoint is known by while it runs; torch 2.7 has no way to ask.
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

Pair = tuple[Tensor, Tensor | None]
Add = Callable[[Pair, Tensor, float], Tensor]
Path = tuple[nn.Module, ...]


def normed_ahead(total: Tensor, norm: nn.Module) -> Tensor | None:
    """Return what `norm` would compute of `total`, once, if that was noted and still holds."""
    if not hasattr(total, _NOTE):
        return None
    owner, normed, version = getattr(total, _NOTE)
    delattr(total, _NOTE)
    holds = owner is norm and version == total._version and not _is_recomputed()
    return normed if holds else None


def _is_recomputed() -> bool:
    """Whether this is computed under torch's checkpoint, now or for the second time.

    A note does not come back the second time, and the last sum of what is recomputed has no norm.
    """
    is_second = torch._C._current_graph_task_id() != -1
    return is_second or _top_hooks is None or _top_hooks(True) is not None


class NormedSum:
    """In the place of a layer's `bias_dropout_add`: where nothing but a sum is left of it, the
    norm at the end of `path` comes with it. `path` leads through the modules called in between.
    """

    def __init__(self, original: Callable[..., Add], path: Path) -> None:
        self._original = original
        self._path = path

    def __call__(self, training: bool, *args: Any, **kwargs: Any) -> Add:
        """Hand out the function, as Megatron's own does."""
        original = self._original(training, *args, **kwargs)

        def add(x_with_bias: Pair, residual: Tensor, prob: float) -> Tensor:
            x, bias = x_with_bias
            found = None
            if bias is None and not (training and prob) and self._is_ready(x):
                found = self._path[-1].normed_sum(x, residual)
            if found is None:
                return original(x_with_bias, residual, prob)
            normed, total = found
            setattr(total, _NOTE, (self._path[-1], normed, total._version))
            return total

        return add

    def _is_ready(self, x: Tensor) -> bool:
        """Whether a backward will come, and the sum gets to its norm as it is.

        A hook may bring the norm's weight only then, and a module's new `forward` do anything.
        """
        return (
            torch.is_grad_enabled()
            and x.requires_grad
            and not torch.compiler.is_compiling()
            and not _is_recomputed()
            and not any(m._forward_pre_hooks or "forward" in vars(m) for m in self._path)
        )


def wrap_transformer_block_init(original: Callable[..., None]) -> Callable[..., None]:
    """Tell every residual sum of a new block which norm comes next."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _sums_arrive(self.config):
            _link(self)

    return init


def _sums_arrive(config: Any) -> bool:
    """Whether every sum that is made for a backward also reaches its norm before that."""
    if config.recompute_granularity is not None and not (
        config.recompute_granularity == "selective"
        and set(getattr(config, "recompute_modules", None) or _HARMLESS) <= _HARMLESS
    ):
        return False
    if getattr(config, "cuda_graph_impl", "none") != "none":
        return False
    return not any(getattr(config, name, False) for name in _HARMFUL)


def _link(block: Any) -> None:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    layers = list(block.layers)
    ways_out = [*map(_way_into, layers[1:]), (block.final_layernorm,)]
    for layer, way_out in zip(layers, ways_out):
        if type(layer) is TransformerLayer:
            for name, path in (("self_attn_bda", _way_to_mlp(layer)), ("mlp_bda", way_out)):
                if path and hasattr(path[-1], "normed_sum"):
                    setattr(layer, name, NormedSum(getattr(layer, name), path))


def _way_to_mlp(layer: Any) -> Path:
    """Return the modules from the sum behind the attention to the norm before the MLP."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP

    between = (layer.pre_cross_attn_layernorm, layer.cross_attention, layer.cross_attn_bda)
    if not all(isinstance(module, IdentityOp) for module in between):
        return ()
    if not isinstance(layer.pre_mlp_layernorm, IdentityOp):
        return (layer.pre_mlp_layernorm,)
    return (layer.mlp, layer.mlp.linear_fc1) if type(layer.mlp) is MLP else ()


def _way_into(layer: Any) -> Path:
    """Return the modules from the input of a layer to its first norm."""
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_layer import TransformerLayer

    if type(layer) is not TransformerLayer:
        return ()
    if not isinstance(layer.input_layernorm, IdentityOp):
        return (layer, layer.input_layernorm)
    attention = layer.self_attention
    is_plain = type(attention) is SelfAttention
    return (layer, attention, attention.linear_qkv) if is_plain else ()
