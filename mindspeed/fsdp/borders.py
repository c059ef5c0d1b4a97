"""Types at the border of a module that keeps its own within a model that computes in another."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.utils import _apply_to_tensors

from mindspeed.fsdp.plan import NEVER_RUN


def cast_at_border(module: nn.Module, outside: torch.dtype) -> None:
    """Give an ignored module inputs of its own type, and hand on what it returns in the outer."""
    if isinstance(module, NEVER_RUN):
        for child in module.children():
            cast_at_border(child, outside)
        return
    inside = next((p.dtype for p in module.parameters() if p.is_floating_point()), outside)
    if inside == outside:
        return

    def enter(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _cast(args, inside), _cast(kwargs, inside)

    def leave(_: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, outside)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return _apply_to_tensors(partial(_to, dtype), values)


def _to(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
