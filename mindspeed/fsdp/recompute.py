"""Activation recompute of one module: its forward runs again in the backward pass."""

import functools
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint


def recompute(module: nn.Module, use_reentrant: bool) -> None:
    """Checkpoint the forward of a module in place: no wrapper, so no name of a weight changes."""
    plain = module.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        if use_reentrant:
            return _reentrant(module, plain, args, kwargs)
        # By position, as torch keeps the random numbers of the devices that it sees there only.
        return checkpoint(_call, plain, args, kwargs, use_reentrant=False)

    module.forward = forward


def _call(forward: Any, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _reentrant(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
    """Hand torch every tensor by position: it neither takes keywords nor looks into containers."""
    leaves, given = tree_flatten((args, kwargs))
    made: TreeSpec | None = None

    def run(_: torch.Tensor, *leaves: Any) -> tuple[Any, ...]:
        nonlocal made
        inner_args, inner_kwargs = tree_unflatten(leaves, given)
        values, made = tree_flatten(forward(*inner_args, **inner_kwargs))
        return tuple(values)

    # torch gives no gradients at all unless an input wants one, and behind a frozen embedding
    # none does; this one stands for the trained weights of the module.
    wants = any(parameter.requires_grad for parameter in module.parameters())
    stand_in = torch.zeros((), requires_grad=wants)
    values = checkpoint(run, stand_in, *leaves, use_reentrant=True)
    assert made is not None
    return tree_unflatten(values, made)
