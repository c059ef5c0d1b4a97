"""Activation recompute of one module: its forward runs again in the backward pass."""

import functools
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint


def recompute(module: nn.Module, use_reentrant: bool) -> None:
    """Checkpoint the forward of a module in place: no wrapper, so parameter names stay."""
    plain = module.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        if use_reentrant:
            return _reentrant(module, plain, args, kwargs)
        # Positional: torch saves the RNG state only of devices it finds in positional arguments.
        return checkpoint(_call, plain, args, kwargs, use_reentrant=False)

    module.forward = forward


def _call(forward: Any, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _reentrant(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
    """Pass every tensor by position: torch neither takes keywords nor inspects containers."""
    leaves, input_spec = tree_flatten((args, kwargs))
    output_spec: TreeSpec | None = None

    def run(_: torch.Tensor, *leaves: Any) -> tuple[Any, ...]:
        nonlocal output_spec
        inner_args, inner_kwargs = tree_unflatten(leaves, input_spec)
        values, output_spec = tree_flatten(forward(*inner_args, **inner_kwargs))
        return tuple(values)

    # torch computes no gradients at all unless an input requires one, and behind a frozen
    # embedding none does; this one stands for the trainable weights of the module.
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    dummy = torch.zeros((), requires_grad=is_trained)
    outputs = checkpoint(run, dummy, *leaves, use_reentrant=True)
    assert output_spec is not None
    return tree_unflatten(outputs, output_spec)
