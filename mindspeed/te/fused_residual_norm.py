"""A residual sum and the norm that reads it in one kernel, forward and backward.

A layer of Megatron adds its residual, and another module, which may belong to the next layer,
normalises the sum. When a block is built, each such sum and norm get one `ResidualNorm` between
them. While the block's forward runs, the sum computes both results and puts them there, and the
norm takes its own if it is called with that very sum. Code in between that hands on another tensor
(offloading, hooks) makes the norm compute its result itself; the sum stays right, and stops
computing the norm once that was for nothing twice. Outside of the block's forward, as in recompute
and in schedules that call parts of layers, sums and norms are Megatron's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed.memory.swap import is_swap

# How torch shows that saved-tensor hooks are active, as under its checkpoint; 2.7 does not.
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

Pair = tuple[Tensor, Tensor | None]
Add = Callable[[Pair, Tensor, float], Tensor]


class ResidualNorm:
    """Between a residual sum and the norm that reads it.

    Args:
        path: the modules that are called from the sum to the norm, which comes last. Its
            `add_norm(x, residual)` returns the norm of the sum, and the sum.
    """

    MAX_MISSES = 2

    def __init__(self, path: Sequence[Any]) -> None:
        self.path = tuple(path)
        self._is_open = False
        self._misses = 0
        self._normed: Tensor | None = None
        self._total: Tensor | None = None
        self._version = 0
        self._is_recorded = False

    def open(self) -> None:
        """Begin a forward pass of the block."""
        self._is_open = self._misses < self.MAX_MISSES

    def close(self) -> None:
        """End it, and drop a norm that was not taken."""
        self._is_open = False
        if self._normed is not None:
            self._misses += 1
            self._normed = self._total = None

    def add(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """Return x + residual and keep the norm of it; None where the sum is to be made alone."""
        if not (self._is_open and self._is_direct()):
            return None
        is_recorded = x.requires_grad
        if not (_is_recorded_as_is() if is_recorded else self._is_evaluated(residual)):
            return None
        # Megatron enables gradients around every sum, in passes without gradients too.
        with torch.set_grad_enabled(is_recorded):
            found: tuple[Tensor, Tensor] | None = self.path[-1].add_norm(x, residual)
        if found is None:
            return None
        self._normed, self._total = found
        self._version, self._is_recorded = self._total._version, is_recorded
        return self._total

    def take(self, x: Tensor) -> Tensor | None:
        """Return the norm of x if x is the last sum, as it was made; only once.

        What a checkpoint runs takes nothing: its recompute would find nothing here. A norm without
        a gradient is taken in a pass without gradients only.
        """
        if self._total is not x or self._version != x._version:
            return None
        if not (_is_recorded_as_is() if self._is_recorded else not torch.is_grad_enabled()):
            return None
        normed = self._normed
        self._normed = self._total = None
        self._misses = 0
        return normed

    def _is_direct(self) -> bool:
        """Return whether the norm's weight is there, and nothing replaces the modules in between.

        A forward pre-hook may bring the weight later (DDP's overlapped gather, FSDP), and a forward
        that was replaced may do anything.
        """
        return not torch.compiler.is_compiling() and not any(
            m._forward_pre_hooks or "forward" in vars(m) for m in self.path
        )

    def _is_evaluated(self, residual: Tensor) -> bool:
        """Return whether a sum without a gradient is one of an evaluation.

        The first run of a checkpoint has no gradients either, but it is one of training.
        """
        return not (
            residual.requires_grad
            or any(m.training for m in self.path)
            or torch.is_inference_mode_enabled()  # there a sum has no version
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out tensors of a running forward pass, which cannot be copied."""
        return vars(self) | {"_is_open": False, "_normed": None, "_total": None}


def _is_recorded_as_is() -> bool:
    """Return whether autograd records, without the saved-tensor hooks of checkpoints."""
    if not torch.is_grad_enabled() or _top_hooks is None:
        return False
    hooks = _top_hooks(True)
    return hooks is None or is_swap(hooks[0])


class AddWithNorm:
    """A layer's `bias_dropout_add` that leaves a plain sum to a `ResidualNorm`."""

    def __init__(self, original: Callable[..., Add], residual_norm: ResidualNorm) -> None:
        self._original = original
        self._residual_norm = residual_norm

    def __call__(self, training: bool, *args: Any, **kwargs: Any) -> Add:
        """Return the function that adds, as Megatron's own does."""
        original = self._original(training, *args, **kwargs)

        def add(x_with_bias: Pair, residual: Tensor, prob: float) -> Tensor:
            x, bias = x_with_bias
            total = None
            if bias is None and not (training and prob):
                total = self._residual_norm.add(x, residual)
            return original(x_with_bias, residual, prob) if total is None else total

        return add


def wrap_transformer_block_init(original: Callable[..., None]) -> Callable[..., None]:
    """Put a ResidualNorm between each residual sum of a new block and the norm that reads it."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.residual_norms = _connect(self)

    return init


def wrap_transformer_block_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the block's residual sums compute norms while its forward runs."""

    @functools.wraps(original)
    def forward(
        self: Any, hidden_states: Any, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Any:
        # Blocks that were built before the feature was switched on have none.
        residual_norms: list[ResidualNorm] = getattr(self, "residual_norms", [])
        for one in residual_norms:
            one.open()
        try:
            return original(self, hidden_states, attention_mask, *args, **kwargs)
        finally:
            for one in residual_norms:
                one.close()

    return forward


def _connect(block: Any) -> list[ResidualNorm]:
    """Put a ResidualNorm between each sum and norm that the block's forward calls in turn."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    found = []
    layers = list(block.layers)
    # A block that recomputes whole layers runs the norms of a layer apart from the sum before it.
    is_recomputed = block.config.recompute_granularity == "full"
    after = [() if is_recomputed else _path_to_input_norm(layer) for layer in layers[1:]]
    for layer, path_after in zip(layers, [*after, (block.final_layernorm,)]):
        if type(layer) is not TransformerLayer:
            continue
        for name, path in (("self_attn_bda", _path_to_mlp_norm(layer)), ("mlp_bda", path_after)):
            if path and hasattr(path[-1], "add_norm"):
                residual_norm = ResidualNorm(path)
                path[-1].residual_norm = residual_norm
                setattr(layer, name, AddWithNorm(getattr(layer, name), residual_norm))
                found.append(residual_norm)
    return found


def _path_to_mlp_norm(layer: Any) -> tuple[nn.Module, ...]:
    """Return the modules from the sum behind the attention to the norm before the MLP."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP

    between = (layer.pre_cross_attn_layernorm, layer.cross_attention, layer.cross_attn_bda)
    if not all(isinstance(module, IdentityOp) for module in between):
        return ()
    if not isinstance(layer.pre_mlp_layernorm, IdentityOp):
        return () if layer.recompute_pre_mlp_layernorm else (layer.pre_mlp_layernorm,)
    is_plain = type(layer.mlp) is MLP and not layer.recompute_mlp
    return (layer.mlp, layer.mlp.linear_fc1) if is_plain else ()


def _path_to_input_norm(layer: Any) -> tuple[nn.Module, ...]:
    """Return the modules from the input of a layer to its first norm."""
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_layer import TransformerLayer

    if type(layer) is not TransformerLayer:
        return ()
    if not isinstance(layer.input_layernorm, IdentityOp):
        return () if layer.recompute_input_layernorm else (layer, layer.input_layernorm)
    attention = layer.self_attention
    is_plain = type(attention) is SelfAttention
    return (layer, attention, attention.linear_qkv) if is_plain else ()
