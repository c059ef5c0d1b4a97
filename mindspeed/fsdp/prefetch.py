"""Gather modules ahead of their use, in the order in which the forward pass takes them."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from mindspeed.fsdp.options import FsdpOptions
from mindspeed.fsdp.plan import Plan


def prefetch(model: nn.Module, plan: Plan) -> None:
    """Gather ahead in the order of definition, and after the first pass in the one it took."""
    units = [model.get_submodule(name) for name in plan.order]
    _set_order(units, plan.options)
    if plan.options.num_to_forward_prefetch or plan.options.num_to_backward_prefetch > 1:
        _follow_first_pass(model, units, plan.options)


def _follow_first_pass(model: nn.Module, units: list[nn.Module], options: FsdpOptions) -> None:
    seen: dict[nn.Module, None] = {}

    def note(module: nn.Module, _: Any) -> None:
        seen.setdefault(module)

    def end(*_: Any) -> None:
        for hook in hooks:
            hook.remove()
        if (order := list(seen)) != units:  # what did not run is gathered when it does
            _set_order(order, options)

    hooks = [unit.register_forward_pre_hook(note) for unit in units]
    hooks.append(model.register_forward_hook(end))


def _set_order(units: Sequence[nn.Module], options: FsdpOptions) -> None:
    """Tell every sharded module which ones to gather ahead."""
    for module, ahead in _ahead(units, options.num_to_forward_prefetch):
        module.set_modules_to_forward_prefetch(ahead)
    if options.num_to_backward_prefetch == 1:
        return  # torch does so by itself, in the order that the forward pass really took
    for module, ahead in _ahead(units[::-1], options.num_to_backward_prefetch):
        # An empty list is torch's default of one; a module that names itself, which is gathered
        # by then, prefetches nothing.
        module.set_modules_to_backward_prefetch(ahead or [module])


def _ahead(units: Sequence[nn.Module], count: int) -> list[tuple[FSDPModule, list[FSDPModule]]]:
    """Return for every module the next ones of a pass."""
    sharded = [unit for unit in units if isinstance(unit, FSDPModule)]
    assert len(sharded) == len(units)
    return [(module, sharded[i + 1 : i + 1 + count]) for i, module in enumerate(sharded)]
