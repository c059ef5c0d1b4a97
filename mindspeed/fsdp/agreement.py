"""Ranks that run different parts of a model still issue the same collectives in the same order.

Every gather and every reduction of a unit is a slot. All ranks go through the same slots: one that
has no use for a slot takes part and throws the weights away, or gives zeros. The slots of the last
passes are the schedule of the next, so ranks need no messages within a pass. What a rank needs
beyond the schedule it asks for when the schedule is at its end; all ranks answer there.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mindspeed.fsdp.exchange import Answer, Exchange
from mindspeed.fsdp.plan import Plan
from mindspeed.fsdp.schedule import Pass, Schedule
from mindspeed.fsdp.unit import UnitGroup, in_backward

GATHER, GATHER_PART, REDUCE = range(3)
"""A gather from all shards, one from those of reshard_after_forward: N, a reduction."""
KINDS = 3


def agree_on_collectives(model: nn.Module, plan: Plan) -> None:
    """Let the collectives of a sharded model follow one order on all ranks."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    experts = {model.get_submodule(name) for name in plan.experts}
    states = [module._get_fsdp_state() for module in modules]
    groups = [(module in experts, g) for module, s in zip(modules, states) for g in groups_of(s)]
    agreement = Agreement([UnitGroup(g) for _, g in groups], [is_expert for is_expert, _ in groups])
    for number, (_, group) in enumerate(groups):
        group.unshard = functools.partial(agreement.unshard, number)
        group.wait_for_unshard = functools.partial(agreement.wait, number)
        group.post_forward = functools.partial(agreement.post_forward, number)
        group.post_backward = functools.partial(agreement.post_backward, number)
    for module, state in zip(modules, states, strict=True):
        module.register_forward_pre_hook(functools.partial(agreement.begin, state), prepend=True)
        module.register_forward_hook(functools.partial(agreement.end, state))
        end = state._root_post_backward_final_callback
        state._root_post_backward_final_callback = functools.partial(agreement.end_backward, end)


def groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of a module; before torch 2.12 it had one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


class Agreement:
    """What all ranks know of the order of collectives, and this rank's place in it."""

    def __init__(self, units: list[UnitGroup], are_experts: list[bool]) -> None:
        self._units, self._are_experts = units, are_experts
        self._schedules: dict[tuple[bool, bool], Schedule] = {}
        self._pass: Pass | None = None
        self._touched: list[list[int]] = [[] for _ in units]
        self._exchange = Exchange(KINDS * len(units))

    # What torch calls in place of its own methods

    def unshard(self, number: int, async_op: bool = False) -> None:
        """Gather, if all ranks are about to; what is needed is gathered in wait at the latest."""
        unit = self._units[number]
        if unit.gathers and not self._take(self._gather_slot(number), is_ahead=True):
            return
        unit.unshard(async_op)

    def wait(self, number: int) -> None:
        """Have the weights."""
        unit = self._units[number]
        if unit.gathers:
            self._take(self._gather_slot(number))
            unit.unshard(unit.group.unshard_async_op)
        unit.wait()

    def post_forward(self, number: int, module: Any, inputs: Any, output: Any) -> Any:
        """Note that a backward pass follows; what is recomputed may be noted already."""
        unit = self._units[number]
        if torch.is_grad_enabled() and not (in_backward() and unit.awaited):
            unit.awaited += 1
        return unit.post_forward(module, inputs, output)

    def post_backward(self, number: int, *_: Any) -> None:
        """Reduce the gradients of a unit together with all ranks."""
        unit = self._units[number]
        unit.awaited = max(0, unit.awaited - 1)
        if not (unit.group.reduce_grads and any(unit.real())):
            unit.accumulate()
            return
        self._take(KINDS * number + REDUCE)
        self._touch(number)
        unit.reduce()

    def begin(self, state: Any, *_: Any) -> None:
        """Begin a forward pass, if this module is the outermost to run."""
        if not in_backward() and state._state_ctx.iter_forward_root is None:
            self._open(is_backward=False)

    def end(self, state: Any, *_: Any) -> None:
        """End a forward pass together with all ranks."""
        if not in_backward() and state._state_ctx.iter_forward_root is None:
            self._finish(is_backward=False)

    def end_backward(self, torchs_own: Any) -> None:
        """End a backward pass together with all ranks, before torch waits for its reductions.

        What has nothing to reduce torch reshards afterwards: another rank may still gather it.
        """
        for number, unit in enumerate(self._units):
            # Also of a unit that torch takes for done: one recomputed twice in this pass is not.
            if unit.group.reduce_grads and any(unit.real()):
                self.post_backward(number)
        self._finish(is_backward=True)
        torchs_own()

    # The order

    def _gather_slot(self, number: int) -> int:
        is_part = self._units[number].group.is_sharded_post_forward
        return KINDS * number + (GATHER_PART if is_part else GATHER)

    def _take(self, slot: int, is_ahead: bool = False) -> bool:
        """Come to a slot of this rank's own; a gather ahead of need neither waits nor asks."""
        now = self._now(is_backward=slot % KINDS == REDUCE or in_backward())
        while not now.is_ahead(slot):
            if is_ahead and now.schedule.is_known:
                return False
            self._pass_by(now)
            self._ask(now, slot)
        if is_ahead and now.schedule.is_known and now.ahead[0][1] != slot:
            return False
        while now.ahead[0][1] != slot:
            self._join(now.pop(), now)
        now.take()
        return True

    def _join(self, slot: int, now: Pass) -> None:
        """Take part in a collective that this rank has no use for."""
        number, kind = divmod(slot, KINDS)
        if kind == REDUCE:
            if not self._units[number].is_needed:
                self._touch(number)
            self._units[number].join_reduce()
        else:
            self._units[number].join_gather(now.is_backward, kind == GATHER_PART)

    def _touch(self, number: int) -> None:
        """Note which parameters this rank has gradients for."""
        real, before = self._units[number].real(), self._touched[number]
        self._touched[number] = [int(a or b) for a, b in zip(real, before or real, strict=True)]

    def _pass_by(self, now: Pass) -> None:
        while now.ahead:
            self._join(now.pop(), now)

    def _finish(self, is_backward: bool) -> None:
        """Go on with the others until no rank needs anything more; then learn from the pass."""
        now = self._now(is_backward)
        self._pass_by(now)
        while not (answer := self._ask(now, None)).is_end:
            self._pass_by(now)
        for unit, used in zip(self._units, answer.touched, strict=True):
            unit.drop()
            if is_backward:
                unit.forget(used)
                unit.awaited = 0
        self._touched = [[] for _ in self._units]
        if now.has_asked:
            now.schedule.merge(self._exchange.sequences(now.taken))
        else:
            now.schedule.age(answer.used)
        self._pass = None

    def _now(self, is_backward: bool) -> Pass:
        if self._pass is None or self._pass.is_backward != is_backward:
            self._open(is_backward)
        assert self._pass is not None
        return self._pass

    def _open(self, is_backward: bool) -> None:
        """Begin a pass with what all ranks know of passes of its kind."""
        if is_backward:
            is_special = any(unit.group.reduce_grads for unit in self._units)
        else:
            is_special = torch.is_grad_enabled()
        new = Schedule(unlike=int(not is_backward))
        # Experts exchange tokens within a pass: there no rank may wait for another at its end.
        is_learned = not any(self._are_experts)
        kind = (is_backward, is_special)
        schedule = self._schedules.setdefault(kind, new) if is_learned else new
        self._pass = Pass(schedule, is_backward, is_special)

    def _ask(self, now: Pass, slot: int | None) -> Answer:
        """Learn what all ranks need now, and put it ahead; if no rank needs anything, it ends."""
        touched = [
            marks or [0] * len(unit.trained)
            for marks, unit in zip(self._touched, self._units, strict=True)
        ]
        answer = self._exchange.ask(now, slot, touched)
        # Experts exchange tokens: all ranks have to be there before one may go in.
        free = [s for s in answer.asked if s % KINDS == REDUCE or not self._are_experts[s // KINDS]]
        now.ahead.extend((None, other) for other in free or answer.asked)
        now.has_asked = now.has_asked or not answer.is_end
        return answer
