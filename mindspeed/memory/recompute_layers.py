"""Which layers of a block of Megatron's recompute activation functions or norms, and how.

Layers that are recomputed as a whole come first (`--recompute-method block`); the next ones drop
single tensors. An MLP, dense or of experts, runs Megatron's own forward around linears that mark
where the activation function begins and ends. A norm inside the next linear is recomputed there;
one that is a module of its own, by hooks on it and on the module that reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed.memory.recompute import Recompute, is_kept

Init = Callable[..., None]


def wrap_init_for_activations(original: Init, num_layers: int | None) -> Init:
    """Let the layers of a new block recompute their activation functions."""

    def set_up(layer: nn.Module) -> None:
        from megatron.core.transformer.mlp import MLP
        from megatron.core.transformer.moe.experts import TEGroupedMLP

        for module in layer.modules():
            if isinstance(module, (MLP, TEGroupedMLP)):
                module.recompute_activation_function = True

    return _wrap_init(original, num_layers, set_up)


def wrap_init_for_norms(original: Init, num_layers: int | None) -> Init:
    """Let the layers of a new block recompute their norms."""

    def set_up(layer: Any) -> None:
        from megatron.core.transformer.identity_op import IdentityOp

        for module in layer.modules():
            if hasattr(module, "recompute_norm"):
                module.recompute_norm = True
        pairs = (
            (layer.input_layernorm, layer.self_attention),
            (layer.pre_mlp_layernorm, layer.mlp),
        )
        for norm, reader in pairs:
            if not isinstance(norm, IdentityOp):
                NormRecompute().attach(norm, reader)

    return _wrap_init(original, num_layers, set_up)


def _wrap_init(original: Init, num_layers: int | None, set_up: Callable[[Any], None]) -> Init:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for layer in chosen_layers(self, num_layers):
            set_up(layer)

    return init


def chosen_layers(block: Any, num_layers: int | None) -> Iterator[Any]:
    """Yield the layers behind those that are recomputed as a whole, `num_layers` of them or all."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    config = block.config
    first = config.recompute_num_layers if config.recompute_granularity == "full" else 0
    last = None if num_layers is None else first + num_layers
    for layer in block.layers[first:last]:
        if isinstance(layer, TransformerLayer):
            yield layer


class NormRecompute:
    """Between a norm that is a module of its own and the module that reads its output."""

    def __init__(self) -> None:
        self._recompute: Recompute | None = None
        self._output: Tensor | None = None
        self._stack = ExitStack()

    def attach(self, norm: nn.Module, reader: nn.Module) -> None:
        """Watch both modules."""
        self._norm = norm
        norm.register_forward_hook(self._after_norm)
        reader.register_forward_pre_hook(self._before_reader)
        reader.register_forward_hook(self._after_reader, always_call=True)

    def _after_norm(self, norm: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        self._recompute = self._output = None
        if is_kept(output):
            # The forward of the module, not the module: its hooks are for the first run.
            self._recompute, self._output = Recompute(norm.forward, args[0]), output

    def _before_reader(self, reader: nn.Module, args: tuple[Any, ...]) -> None:
        recompute, output = self._recompute, self._output
        self._recompute = self._output = None
        if recompute is not None and output is not None and args and args[0] is output:
            self._stack.enter_context(recompute.of_output(output))

    def _after_reader(self, *_: Any) -> None:
        self._stack.close()


def wrap_mlp_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Recompute the activation function of an MLP that is marked so."""

    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: Tensor,
        per_token_scale: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not _recomputes(self):
            return original(self, hidden_states, per_token_scale, *args, **kwargs)
        with MarkedMlp(self, original, per_token_scale) as marked:
            return original(marked, hidden_states, per_token_scale, *args, **kwargs)

    return forward


def wrap_grouped_mlp_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Recompute the activation function of grouped experts that are marked so."""

    @functools.wraps(original)
    def forward(
        self: Any,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> Any:
        arguments = (tokens_per_expert, permuted_probs)
        if not _recomputes(self) or self.config.moe_apply_probs_on_input or self.config.fp8:
            return original(self, permuted_local_hidden_states, *arguments)
        with MarkedMlp(self, original, *arguments) as marked:
            return original(marked, permuted_local_hidden_states, *arguments)

    return forward


def _recomputes(mlp: Any) -> bool:
    wanted = getattr(mlp, "recompute_activation_function", False)
    return wanted and torch.is_grad_enabled() and not torch.compiler.is_compiling()


class MarkedMlp:
    """An MLP whose two linears tell where its activation function begins and ends.

    Args:
        mlp: the module.
        forward: Megatron's.
        arguments: those of `forward` behind the hidden states.
        from_input: recompute the first linear as well, so that only its input is kept.
    """

    def __init__(
        self, mlp: Any, forward: Callable[..., Any], *arguments: Any, from_input: bool = False
    ) -> None:
        self._mlp = mlp
        self._activate = functools.partial(_activate, mlp, forward)
        self._arguments = arguments
        self._from_input = from_input
        self._stack = ExitStack()
        self._recompute: Recompute

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mlp, name)

    def __enter__(self) -> MarkedMlp:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def linear_fc1(self, hidden_states: Tensor, *args: Any) -> tuple[Tensor, Any]:
        if self._from_input:
            self._recompute = Recompute(self._activate_input, hidden_states, *self._arguments)
            self._stack.enter_context(self._recompute.of_function())
            result: tuple[Tensor, Any] = self._mlp.linear_fc1(hidden_states, *args)
            return result
        preact, bias = self._mlp.linear_fc1(hidden_states, *args)
        self._recompute = Recompute(self._activate, preact, bias, *self._arguments)
        if is_kept(preact):
            self._stack.enter_context(self._recompute.of_function())
        return preact, bias

    def linear_fc2(self, activated: Tensor, *args: Any) -> Any:
        self._stack.close()
        if not is_kept(activated):
            return self._mlp.linear_fc2(activated, *args)
        with self._recompute.of_output(activated):
            return self._mlp.linear_fc2(activated, *args)

    def _activate_input(self, hidden_states: Tensor, *arguments: Any) -> Tensor:
        return self._activate(*self._mlp.linear_fc1(hidden_states), *arguments)


class _ActivationOnly:
    """An MLP between whose linears only the activation function is left."""

    def __init__(self, mlp: Any, preact: Tensor, bias: Any) -> None:
        self._mlp = mlp
        self._preact = (preact, bias)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mlp, name)

    def linear_fc1(self, *_: Any) -> tuple[Tensor, Any]:
        return self._preact

    def linear_fc2(self, activated: Tensor, *_: Any) -> tuple[Tensor, None]:
        return activated, None


def _activate(
    mlp: Any, forward: Callable[..., Any], preact: Tensor, bias: Any, *arguments: Any
) -> Tensor:
    activated: Tensor = forward(_ActivationOnly(mlp, preact, bias), preact, *arguments)[0]
    return activated
