"""Activation recompute of one module: its forward runs again in the backward pass."""

import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from mindspeed.config import ConfigError


def recompute(module: nn.Module, use_reentrant: bool) -> None:
    """Checkpoint the forward of a module in place: no wrapper, so parameter names stay."""
    plain, kind = module.forward, type(module).__name__

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        if use_reentrant:
            return _reentrant(module, kind, plain, args, kwargs)
        # Positional: torch saves the RNG state only of devices it finds in positional arguments.
        return checkpoint(_call, plain, args, kwargs, use_reentrant=False)

    module.forward = forward


def _call(forward: Any, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _reentrant(module: nn.Module, kind: str, forward: Any, args: Any, kwargs: Any) -> Any:
    """Pass every tensor by position: torch neither takes keywords nor inspects containers."""
    leaves, input_shape = flatten((args, kwargs))
    output_shape: _Shape | None = None

    def run(_: torch.Tensor, *leaves: Any) -> tuple[Any, ...]:
        nonlocal output_shape
        inner_args, inner_kwargs = _unflatten(iter(leaves), input_shape)
        values, output_shape = flatten(forward(*inner_args, **inner_kwargs))
        _check_visible(kind, values)
        return tuple(values)

    # torch computes no gradients at all unless an input requires one, and behind a frozen
    # embedding none does; this one stands for the trainable weights of the module.
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    dummy = torch.zeros((), requires_grad=is_trained)
    outputs = checkpoint(run, dummy, *leaves, use_reentrant=True)
    assert output_shape is not None
    return _unflatten(iter(outputs), output_shape)


class _Shape(NamedTuple):
    """How values were nested: containers, and dataclasses, which pytree takes for leaves."""

    tree: TreeSpec
    objects: "list[tuple[Any, _Shape] | None]"
    """For each leaf of the tree that is a dataclass: a copy without values, and their shape."""


def flatten(values: Any) -> tuple[list[Any], _Shape]:
    """Return all values in containers and dataclasses, and how they were nested."""
    found: list[Any] = []
    objects: list[tuple[Any, _Shape] | None] = []
    leaves, tree = tree_flatten(values)
    for leaf in leaves:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            below, shape = flatten({f.name: getattr(leaf, f.name) for f in _fields(leaf)})
            objects.append((_filled(leaf, {f.name: None for f in _fields(leaf)}), shape))
            found += below
        else:
            objects.append(None)
            found.append(leaf)
    return found, _Shape(tree, objects)


def _unflatten(leaves: Iterator[Any], shape: _Shape) -> Any:
    values = [
        next(leaves) if other is None else _filled(other[0], _unflatten(leaves, other[1]))
        for other in shape.objects
    ]
    return tree_unflatten(values, shape.tree)


def _fields(value: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(value) if hasattr(value, field.name)]


def _filled(value: Any, values: dict[str, Any]) -> Any:
    """Return a copy of a dataclass with other values; its __init__ may take others or check."""
    filled = copy.copy(value)
    for name, new in values.items():
        object.__setattr__(filled, name, new)  # also if it is frozen
    return filled


def hidden_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in an object that is no container, which torch does not look into."""
    if isinstance(value, (torch.Tensor, nn.Module, type)):
        return []
    leaves = tree_leaves(getattr(value, "__dict__", {}))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _check_visible(kind: str, values: list[Any]) -> None:
    """Reject outputs whose tensors torch's reentrant checkpoint would cut off from gradients."""
    for value in values:
        if any(tensor.is_floating_point() for tensor in hidden_tensors(value)):
            raise ConfigError(
                f"recompute_modules: {kind} returns an object ({type(value).__name__}), whose "
                "tensors get no gradient with use_reentrant: true: return tensors, "
                "containers or dataclasses, or set use_reentrant: false"
            )
