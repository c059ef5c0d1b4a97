"""What sees the tensors of a module whose call an operator replaces: hooks and other forwards."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as every_module

WEIGHT_HOOKS = "megatron.core.distributed.distributed_data_parallel"
"""The module whose forward pre-hooks wait for weights and leave the input as it is."""

_BACKWARD_HOOKS = ("backward_hooks", "backward_pre_hooks")
_GLOBAL_HOOKS = tuple(
    getattr(every_module, f"_global_{kind}")
    for kind in ("forward_pre_hooks", "forward_hooks", *_BACKWARD_HOOKS)
)


def has_global_hooks() -> bool:
    """Return whether a hook on all modules is registered."""
    return any(_GLOBAL_HOOKS)


def is_untouched(module: nn.Module) -> bool:
    """Return whether no hook, forward pre-hooks aside, and no other forward sees its tensors."""
    return (
        "forward" not in vars(module)
        and not module._forward_hooks
        and not any(getattr(module, f"_{kind}") for kind in _BACKWARD_HOOKS)
    )


def has_known_pre_hooks(module: nn.Module) -> bool:
    """Return whether no forward pre-hook needs, or may return, an input that is never made."""
    return all(hook.__module__ == WEIGHT_HOOKS for hook in module._forward_pre_hooks.values())


def run_forward_pre_hooks(module: nn.Module, x: Tensor, *others: Any) -> Tensor:
    """Run what a call of the module would run first: there DDP and FSDP bring its weights."""
    for key, hook in module._forward_pre_hooks.items():
        if key in module._forward_pre_hooks_with_kwargs:
            result = hook(module, (x, *others), {})
            result = None if result is None else result[0]
        else:
            result = hook(module, (x, *others))
        if result is not None:
            x = result[0] if isinstance(result, tuple) else result
    return x
