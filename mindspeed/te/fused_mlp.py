"""Megatron's SwiGLU MLP with its two linears and the activation as one path.

fc1 hands its pre-activation and SwiGLU of it to fc2, which keeps the pre-activation for backward
and not the activation. fc1's GEMM may compute SwiGLU in its epilogue. An MLP gets the path when it
is built; code that is put into one of its linears later, a hook or an adapter, makes it Megatron's
again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed.ops.module_hooks import has_global_hooks, is_untouched, run_forward_pre_hooks
from mindspeed.ops.swiglu import gemm_swiglu
from mindspeed.te.pytorch.module.linear import LinearBase


def wrap_mlp_init(original: Callable[..., None]) -> Callable[..., None]:
    """Choose the path of an MLP: `fused_linears` are the classes of its linears if it is fused."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.fused_linears = _classes(self) if is_fusible(self) else None

    return __init__


def wrap_mlp_init_in_epilogue(original: Callable[..., None]) -> Callable[..., None]:
    """Let fc1's GEMM compute SwiGLU in a fused MLP, where a kernel does both."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.swiglu_in_epilogue = True
        if is_fusible(self):
            gemm_swiglu.prepare(self.linear_fc1.params_dtype, self.linear_fc1.in_features)

    return __init__


def wrap_mlp_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run an MLP that was built for it as one path; others stay Megatron's."""

    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: Tensor,
        per_token_scale: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if per_token_scale is not None or torch.compiler.is_compiling() or not _is_as_built(self):
            return original(self, hidden_states, per_token_scale, *args, **kwargs)
        return _forward(self, hidden_states), None

    return forward


def _forward(mlp: Any, hidden_states: Tensor) -> Tensor:
    fc1, fc2 = mlp.linear_fc1, mlp.linear_fc2
    x = run_forward_pre_hooks(fc1, hidden_states)
    in_epilogue = getattr(mlp, "swiglu_in_epilogue", False)
    preact, activated = fc1.linear_swiglu(x, in_epilogue=in_epilogue)
    # A hook that returns another input of fc2 gets its gradient through `activated`.
    given = run_forward_pre_hooks(fc2, activated)
    return fc2.swiglu_linear(preact if given is activated else None, given)


def is_fusible(mlp: Any) -> bool:
    """Return whether an MLP, as it is built, is fc1, SwiGLU and fc2 of this package's linears."""
    return (
        _is_plain_swiglu(mlp.config)
        and _is_plain_linear(mlp.linear_fc1)
        and _is_plain_linear(mlp.linear_fc2)
        and mlp.linear_fc1.parallel_mode != "row"
    )


def _is_plain_swiglu(config: Any) -> bool:
    """Return whether Megatron would call `bias_swiglu_impl` without a bias and other options."""
    offloads = config.cpu_offloading and config.cpu_offloading_activations
    return (
        config.gated_linear_unit
        and config.activation_func is F.silu
        and config.bias_activation_fusion
        and not getattr(config, "use_te_activation_func", False)
        and not (config.add_bias_linear or config.activation_func_fp8_input_store or offloads)
    )


def _is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module is one of the socket's linears without a bias."""
    return (
        type(module).forward in _socket_forwards()
        and not getattr(module, "use_bias", True)
        and not getattr(module, "return_layernorm_output", False)
    )


def _is_as_built(mlp: Any) -> bool:
    """Return whether an MLP is fused and nothing since then sees the tensors between its linears.

    Hooks and adapters may come and go between two steps.
    """
    return (
        getattr(mlp, "fused_linears", None) == _classes(mlp)
        and is_untouched(mlp.linear_fc1)
        and is_untouched(mlp.linear_fc2)
        and not has_global_hooks()
    )


def _classes(mlp: Any) -> tuple[type, type]:
    return type(mlp.linear_fc1), type(mlp.linear_fc2)


@functools.cache
def _socket_forwards() -> frozenset[Any]:
    """Return the forward methods of Megatron's classes around this package's linears."""
    from megatron.core.extensions import transformer_engine as extension

    names = ("TEColumnParallelLinear", "TELayerNormColumnParallelLinear", "TERowParallelLinear")
    classes = (getattr(extension, name, None) for name in names)
    return frozenset(
        one.forward for one in classes if isinstance(one, type) and issubclass(one, LinearBase)
    )
