"""Keep FSDP2 collectives in one order on ranks that run different parts of a model.

Every all-gather and every reduce-scatter of a unit is a slot. All ranks run the same slots: a rank
that has no use for one contributes its shard and frees the result, or contributes zero gradients.
The slots of previous passes are the schedule of the next one, so no messages are sent within a
pass. A rank that needs a slot outside the schedule requests it at the end of the schedule, where
all ranks serve the request.
"""

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import SequenceMatcher
from enum import IntEnum
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import mindspeed.device
from mindspeed.config import ConfigError
from mindspeed.fsdp.param_group import UnitGroup, in_backward, param_groups
from mindspeed.fsdp.plan import Plan
from mindspeed.fsdp.recompute import flatten, hidden_tensors

ALL_GATHER, PARTIAL_ALL_GATHER, REDUCE_SCATTER = range(3)
"""All-gather of all shards, all-gather after `reshard_after_forward: N`, reduce-scatter."""
OPS = 3
MAX_IDLE_PASSES = 100
"""Passes that a slot stays in the schedule although no rank used it."""


class PassKind(IntEnum):
    """Passes with a schedule of their own."""

    NO_GRAD_FORWARD = 0
    FORWARD = 1
    ACCUMULATING_BACKWARD = 2
    BACKWARD = 3

    @property
    def is_backward(self) -> bool:
        """Whether autograd drives the pass."""
        return self >= PassKind.ACCUMULATING_BACKWARD

    def __str__(self) -> str:
        return _PASS_NAMES[self]


_PASS_NAMES = (
    *("a forward pass without gradients", "a forward pass"),
    *("a backward pass", "a backward pass that reduces gradients"),
)


@dataclass
class Schedule:
    """The slots that every rank runs, in order, in every pass of one kind."""

    slots: list[int] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    """Passes since any rank used the slot, per slot."""
    warmup: int = 0
    """Passes to ignore: the first forward pass gathers ahead in another order."""
    is_ready: bool = False
    """False until a pass after warm-up has ended."""

    def merge(self, issued: Iterable[Sequence[int]]) -> None:
        """Extend the schedule to a supersequence of itself and all of these sequences."""
        if self.warmup:
            self.warmup -= 1
            return
        for other in issued:
            slots: list[int] = []
            idle: list[int] = []
            matcher = SequenceMatcher(None, self.slots, other, autojunk=False)
            for tag, begin, end, other_begin, other_end in matcher.get_opcodes():
                slots += self.slots[begin:end]
                idle += [0] * (end - begin) if tag == "equal" else self.idle[begin:end]
                if tag != "equal":
                    slots += other[other_begin:other_end]
                    idle += [0] * (other_end - other_begin)
            self.slots, self.idle = slots, idle
        self.is_ready = True

    def age(self, used: Sequence[int]) -> None:
        """Update the idle counts, and drop slots that no rank has used for MAX_IDLE_PASSES."""
        aged = [0 if mark else passes + 1 for mark, passes in zip(used, self.idle, strict=True)]
        kept = [index for index, passes in enumerate(aged) if passes <= MAX_IDLE_PASSES]
        self.slots = [self.slots[index] for index in kept]
        self.idle = [aged[index] for index in kept]


@dataclass
class PassState:
    """One pass of this rank: upcoming slots, slots it issued, schedule entries it used."""

    schedule: Schedule
    kind: PassKind
    upcoming: deque[tuple[int | None, int]] = field(init=False)
    """Slots that all ranks are about to run, each with its index in the schedule."""
    issued: list[int] = field(default_factory=list)
    used: list[int] = field(init=False)
    has_requests: bool = False
    """Whether any rank needed a slot that was not upcoming, so that the schedule changes."""

    def __post_init__(self) -> None:
        """Start with the whole schedule upcoming."""
        self.upcoming = deque(enumerate(self.schedule.slots))
        self.used = [0] * len(self.schedule.slots)

    def is_upcoming(self, slot: int) -> bool:
        """Return whether all ranks will run the slot without a request."""
        return any(other == slot for _, other in self.upcoming)

    def skip(self) -> int:
        """Remove and return the next slot, which this rank does not use."""
        return self.upcoming.popleft()[1]

    def issue(self) -> None:
        """Use the next slot."""
        index, slot = self.upcoming.popleft()
        if index is not None:
            self.used[index] = 1
        self.issued.append(slot)


@dataclass(frozen=True)
class SyncResult:
    """The union of the messages of all ranks."""

    requested: list[int]
    """Slots that any rank needs now."""
    used: list[int]
    """Schedule entries that any rank used."""
    with_grads: list[list[int]]
    """Parameters that any rank has gradients for, by unit."""

    @property
    def is_end(self) -> bool:
        """Whether no rank needs another slot in this pass."""
        return not self.requested


class HostSync:
    """One small all-reduce over all ranks in host memory, on a process group of its own."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._group = _host_group()

    def sync(self, state: PassState, slot: int | None, with_grads: list[list[int]]) -> SyncResult:
        """Send the slot that this rank needs, and return the union over all ranks."""
        kinds = [int(kind == state.kind) for kind in PassKind]
        requested = [int(number == slot) for number in range(self._num_slots)]
        parts = [kinds, requested, *with_grads, state.used]
        flat = list(chain.from_iterable(parts))
        # The same length in passes of all kinds, or a mismatch could not be detected.
        length = max(len(flat), len(flat) - len(state.used) + 4 * self._num_slots)
        message = torch.tensor(flat + [0] * (length - len(flat)), dtype=torch.uint8)
        if self._group is not None:
            dist.all_reduce(message, dist.ReduceOp.MAX, group=self._group)
        kinds, requested, *with_grads, used = _split(message.tolist(), [len(p) for p in parts])
        if sum(kinds) > 1:
            found = " and another in ".join(str(k) for k in PassKind if kinds[k])
            raise RuntimeError(
                f"a rank is in {found}: in every step all ranks have to call the model, and "
                "backward, equally often"
            )
        slots = [number for number, mark in enumerate(requested) if mark]
        return SyncResult(slots, used, with_grads)

    def all_sequences(self, issued: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the distinct sequences of slots that the ranks issued in a pass."""
        if self._group is None:
            return [tuple(issued)]
        length = torch.tensor(len(issued))
        dist.all_reduce(length, dist.ReduceOp.MAX, group=self._group)
        local = torch.full((int(length),), -1)
        local[: len(issued)] = torch.tensor(issued)
        gathered = [torch.empty_like(local) for _ in range(self._group.size())]
        dist.all_gather(gathered, local, group=self._group)
        return list(dict.fromkeys(tuple(s for s in t.tolist() if s >= 0) for t in gathered))


def synchronize_collectives(model: nn.Module, plan: Plan) -> None:
    """Make the collectives of a sharded model follow one order on all ranks."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    experts = {model.get_submodule(name) for name in plan.experts}
    states: list[Any] = [module._get_fsdp_state() for module in modules]
    groups = [(module in experts, g) for module, s in zip(modules, states) for g in param_groups(s)]
    order = CollectiveOrder([UnitGroup(g) for _, g in groups], [expert for expert, _ in groups])
    for number, (_, group) in enumerate(groups):
        group.unshard = functools.partial(order.unshard, number)
        group.wait_for_unshard = functools.partial(order.wait_for_unshard, number)
        group.post_forward = functools.partial(order.post_forward, number)
        group.post_backward = functools.partial(order.post_backward, number)
    for module, state in zip(modules, states, strict=True):
        module.register_forward_pre_hook(
            functools.partial(order.begin_forward, state), prepend=True
        )
        module.register_forward_hook(functools.partial(order.end_forward, state))
        callback = state._root_post_backward_final_callback
        state._root_post_backward_final_callback = functools.partial(order.end_backward, callback)


class CollectiveOrder:
    """The order of collectives that all ranks share, and this rank's position in it."""

    def __init__(self, units: list[UnitGroup], are_experts: list[bool]) -> None:
        self._units, self._are_experts = units, are_experts
        self._schedules: dict[PassKind, Schedule] = {}
        self._state: PassState | None = None
        self._with_grads: list[list[int]] = [[] for _ in units]
        self._sync = HostSync(OPS * len(units))

    # Methods that torch calls in place of its own

    def unshard(self, number: int, async_op: bool = False) -> None:
        """All-gather now if all ranks are about to; wait_for_unshard gathers at the latest."""
        unit = self._units[number]
        if unit.begins_backward:
            self._check_last_use()
        if unit.needs_all_gather and not self._issue(self._gather_slot(number), is_prefetch=True):
            return
        unit.unshard(async_op)

    def _check_last_use(self) -> None:
        """Reject backward passes after which the freed weights would be used: torch may crash."""
        is_forward = self._state is not None and not self._state.kind.is_backward
        if is_forward or torch.is_grad_enabled():
            when = "within a forward pass" if is_forward else "with create_graph=True"
            raise ConfigError(
                f"gradients are taken {when} through a sharded module, which frees its weights at "
                "the end of that backward pass although they are needed again: call "
                "torch.autograd.grad within the forward of the model, and name no module that it "
                "passes through in sub_modules_to_wrap"
            )

    def wait_for_unshard(self, number: int) -> None:
        """Wait for the gathered weights, gathering them if unshard did not."""
        unit = self._units[number]
        if unit.needs_all_gather:
            self._issue(self._gather_slot(number))
            unit.unshard(unit.group.unshard_async_op)
        unit.wait_for_unshard()

    def post_forward(self, number: int, module: Any, inputs: Any, output: Any) -> Any:
        """Count a pending backward pass; a recomputed forward may be counted already."""
        unit = self._units[number]
        if torch.is_grad_enabled() and not (in_backward() and unit.pending_backwards):
            unit.pending_backwards += 1
        output = unit.post_forward(module, inputs, output)
        if torch.is_grad_enabled() and unit.trainable and not (unit.is_gathered or in_backward()):
            unit.has_visible_output = _is_visible(type(module).__name__, output)
        return output

    def post_backward(self, number: int, *_: Any) -> None:
        """Reduce the gradients of a unit together with all ranks."""
        unit = self._units[number]
        unit.pending_backwards = max(0, unit.pending_backwards - 1)
        if not (unit.group.reduce_grads and any(unit.has_grads())):
            unit.accumulate()
            return
        self._issue(OPS * number + REDUCE_SCATTER)
        self._mark_grads(number)
        unit.reduce()

    def begin_forward(self, state: Any, *_: Any) -> None:
        """Begin a forward pass, if this module is the outermost to run."""
        if not in_backward() and state._state_ctx.iter_forward_root is None:
            self._begin(is_backward=False)

    def end_forward(self, state: Any, *_: Any) -> None:
        """End a forward pass together with all ranks."""
        if not in_backward() and state._state_ctx.iter_forward_root is None:
            self._finish(is_backward=False)

    def end_backward(self, torch_callback: Any) -> None:
        """End a backward pass together with all ranks, before torch waits for its reductions.

        torch reshards units without gradients afterwards: another rank may still gather them.
        """
        for number, unit in enumerate(self._units):
            # Also for a unit that torch considers done: one recomputed twice in this pass is not.
            if unit.group.reduce_grads and any(unit.has_grads()):
                self.post_backward(number)
        self._finish(is_backward=True)
        torch_callback()

    # The order

    def _gather_slot(self, number: int) -> int:
        is_partial = self._units[number].group.is_sharded_post_forward
        return OPS * number + (PARTIAL_ALL_GATHER if is_partial else ALL_GATHER)

    def _issue(self, slot: int, is_prefetch: bool = False) -> bool:
        """Advance to a slot that this rank uses; a prefetch neither advances nor requests."""
        state = self._current(is_backward=slot % OPS == REDUCE_SCATTER or in_backward())
        while not state.is_upcoming(slot):
            if is_prefetch and state.schedule.is_ready:
                return False
            self._skip_all(state)
            self._request(state, slot)
        if is_prefetch and state.schedule.is_ready and state.upcoming[0][1] != slot:
            return False
        while state.upcoming[0][1] != slot:
            self._skip(state.skip(), state)
        state.issue()
        return True

    def _skip(self, slot: int, state: PassState) -> None:
        """Take part in a collective that this rank has no use for."""
        number, op = divmod(slot, OPS)
        if op == REDUCE_SCATTER:
            if not self._units[number].is_in_use:
                self._mark_grads(number)
            self._units[number].dummy_reduce()
        else:
            is_partial = op == PARTIAL_ALL_GATHER
            self._units[number].dummy_all_gather(state.kind.is_backward, is_partial)

    def _skip_all(self, state: PassState) -> None:
        while state.upcoming:
            self._skip(state.skip(), state)

    def _mark_grads(self, number: int) -> None:
        """Record which parameters this rank has gradients for."""
        found, before = self._units[number].has_grads(), self._with_grads[number]
        self._with_grads[number] = [
            int(a or b) for a, b in zip(found, before or found, strict=True)
        ]

    def _finish(self, is_backward: bool) -> None:
        """Serve requests until no rank needs another slot; then update the schedule."""
        state = self._current(is_backward)
        self._skip_all(state)
        while not (result := self._request(state, None)).is_end:
            self._skip_all(state)
        for unit, with_grads in zip(self._units, result.with_grads, strict=True):
            unit.free_unused_all_gather()
            if is_backward:
                unit.clear_unused_grads(with_grads)
                unit.pending_backwards = 0
        self._with_grads = [[] for _ in self._units]
        if state.has_requests:
            state.schedule.merge(self._sync.all_sequences(state.issued))
        else:
            state.schedule.age(result.used)
        self._state = None

    def _current(self, is_backward: bool) -> PassState:
        if self._state is None or self._state.kind.is_backward != is_backward:
            self._begin(is_backward)
        assert self._state is not None
        return self._state

    def _begin(self, is_backward: bool) -> None:
        """Begin a pass with the schedule of its kind."""
        if is_backward:
            reduces = any(unit.group.reduce_grads for unit in self._units)
            kind = PassKind.BACKWARD if reduces else PassKind.ACCUMULATING_BACKWARD
        else:
            kind = PassKind.FORWARD if torch.is_grad_enabled() else PassKind.NO_GRAD_FORWARD
        new = Schedule(warmup=int(not is_backward))
        # Experts exchange tokens within a pass: there no rank may wait for another at its end.
        is_kept = not any(self._are_experts)
        self._state = PassState(self._schedules.setdefault(kind, new) if is_kept else new, kind)

    def _request(self, state: PassState, slot: int | None) -> SyncResult:
        """Queue the slots that any rank requests; without any, the pass ends."""
        with_grads = [
            marks or [0] * len(unit.trainable)
            for marks, unit in zip(self._with_grads, self._units, strict=True)
        ]
        result = self._sync.sync(state, slot, with_grads)
        # Experts exchange tokens: all ranks have to arrive before one may enter.
        free = [
            other
            for other in result.requested
            if other % OPS == REDUCE_SCATTER or not self._are_experts[other // OPS]
        ]
        state.upcoming.extend((None, other) for other in free or result.requested)
        state.has_requests = state.has_requests or not result.is_end
        return result


def _is_visible(kind: str, output: Any) -> bool:
    """Return whether torch finds a tensor in outputs at which to gather the weights for backward.

    An object that hides one is rejected. Without any the result may not be needed, or have left the
    module another way.
    """
    values, _ = flatten(output)
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
        return True
    for value in values:
        if any(tensor.requires_grad for tensor in hidden_tensors(value)):
            raise ConfigError(
                f"sub_modules_to_wrap: {kind.removeprefix('FSDP')} returns an object "
                f"({type(value).__name__}), whose tensors torch does not see, so the weights would "
                "not be gathered for the backward pass: return tensors, containers or dataclasses, "
                "or do not wrap it"
            )
    return False


def _split(values: list[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    start = 0
    for size in sizes:
        yield values[start : start + size]
        start += size


def _host_group() -> dist.ProcessGroup | None:
    if dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    # New groups do not inherit the timeout of the run.
    options = getattr(world._get_backend(mindspeed.device.current().torch_device), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return dist.new_group(backend=mindspeed.device.known()["cpu"].backend, timeout=timeout)
