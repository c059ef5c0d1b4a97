"""One FSDP2 parameter group, and this rank's part in its collectives without using the result.

This is the only file that uses torch's FSDPParamGroup; the attributes used exist from torch 2.7 to
2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def in_backward() -> bool:
    """Return whether autograd is running a backward pass, a recomputed forward in it included."""
    return torch._C._current_graph_task_id() != -1


def param_groups(state: Any) -> list[Any]:
    """Return the parameter groups of a module; before torch 2.12 there was one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


class UnitGroup:
    """A parameter group with its original methods, saved before they are replaced."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.unshard, self.wait_for_unshard = group.unshard, group.wait_for_unshard
        self.post_backward, self.post_forward = group.post_backward, group.post_forward
        self.pending_backwards = 0
        """Forward passes of this rank whose backward pass has not run yet."""
        self.grad_was_none: list[bool] | None = None
        """Which parameters had no gradient before this backward pass reduced any."""

    @property
    def has_visible_output(self) -> bool:
        """Whether its last output had a tensor with a gradient, where that is known."""
        return getattr(self.group, "has_visible_output", True)

    @has_visible_output.setter
    def has_visible_output(self, value: bool) -> None:
        self.group.has_visible_output = value  # of all that wrap the group

    @property
    def is_gathered(self) -> bool:
        """Whether the weights are unsharded or being gathered."""
        return self.group.is_unsharded or self.group._all_gather_result is not None

    @property
    def needs_all_gather(self) -> bool:
        """Whether unshard would issue a collective."""
        group = self.group
        return not self.is_gathered and (group.unshard_in_backward or not self.begins_backward)

    @property
    def begins_backward(self) -> bool:
        """Whether this rank is about to run its backward pass."""
        return bool(self.group._training_state == TrainingState.PRE_BACKWARD)

    @property
    def is_in_backward(self) -> bool:
        """Whether its backward pass has begun and not ended."""
        return bool(self.group._training_state != TrainingState.IDLE)

    @property
    def was_gathered(self) -> bool:
        """Whether the weights were unsharded before, without which nothing can be reduced."""
        return all(hasattr(p, "_unsharded_param") for p in self.group.fsdp_params)

    @property
    def is_in_use(self) -> bool:
        """Whether this rank is running the unit, or its backward pass is still to come."""
        inside = (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)
        return self.pending_backwards > 0 or self.group._training_state in inside

    @property
    def trainable(self) -> list[Any]:
        """The parameters that take part in every reduction."""
        return [p for p in self.group.fsdp_params if p.sharded_param.requires_grad]

    def has_grads(self) -> list[bool]:
        """Return which of the trainable parameters have a gradient on this rank."""
        return [_has_grad(parameter) for parameter in self.trainable]

    def dummy_all_gather(self, is_backward: bool, is_partial: bool) -> None:
        """Take part in an all-gather that this rank did not request; keep what it will need."""
        group = self.group
        if self.is_gathered or (group.is_sharded_post_forward and not is_partial):
            self._contribute_shard(is_partial)
        elif is_backward:
            with group.use_training_state(TrainingState.PRE_BACKWARD):
                self.unshard(group.unshard_async_op)
                if not self.is_in_use:
                    self.wait_for_unshard()
                    group._to_sharded()
        else:
            with group.use_training_state(TrainingState.FORWARD):
                self.unshard(False)
                self.wait_for_unshard()
                group.reshard()  # or not, as after its own forward

    def _contribute_shard(self, is_partial: bool) -> None:
        """Send this rank's shard; the weights of this rank stay as they are."""
        group = self.group
        mesh = group.post_forward_mesh_info if is_partial else group.mesh_info
        ranks = getattr(mesh, "shard_process_group", None)
        if ranks is None or ranks.size() == 1:
            return
        name = "_sharded_post_forward_param_data" if is_partial else "_sharded_param_data"
        shards = [getattr(parameter, name) for parameter in group.fsdp_params]
        dtypes = {p.param_dtype or s.dtype for p, s in zip(group.fsdp_params, shards, strict=True)}
        inputs = [
            shard.to(group.device, parameter.param_dtype or shard.dtype)
            for parameter, shard in zip(group.fsdp_params, shards, strict=True)
        ]
        if len(dtypes) > 1:
            inputs = [shard.view(torch.uint8) for shard in inputs]
        flat = torch.cat(inputs)
        dist.all_gather_into_tensor(flat.new_empty(flat.numel() * ranks.size()), flat, group=ranks)

    def reduce(self) -> None:
        """Reduce the gradients of all trainable parameters, zeros where this rank has none."""
        if self.grad_was_none is None:
            self.grad_was_none = [p.sharded_param.grad is None for p in self.trainable]
        self._fill_missing_grads()
        self.post_backward()

    def dummy_reduce(self) -> None:
        """Take part in a reduction that this rank did not request."""
        if not self.is_in_use:
            self.reduce()  # with gradients of earlier micro-batches, if any
            return
        group = self.group
        if group.is_sharded_post_forward and not self.is_gathered:
            # The other ranks leave that state: later all-gathers take all shards.
            group._to_sharded()
        with self._stashed_grads(), group.use_training_state(group._training_state):
            self.reduce()

    @contextmanager
    def _stashed_grads(self) -> Iterator[None]:
        """Set aside gradients that are still accumulating, and keep the weights they need."""
        group = self.group
        saved = [(p, p.unsharded_accumulated_grad, p.unsharded_param.grad) for p in self.trainable]
        reshard, group.reshard_after_backward = group.reshard_after_backward, False
        for parameter, _, _ in saved:
            parameter.unsharded_accumulated_grad = parameter.unsharded_param.grad = None
        try:
            yield
        finally:
            group.reshard_after_backward = reshard
            for parameter, accumulated, grad in saved:
                parameter.unsharded_accumulated_grad = accumulated
                parameter.unsharded_param.grad = grad

    @torch.no_grad()
    def _fill_missing_grads(self) -> None:
        trainable = self.trainable
        for parameter in trainable:
            if not _has_grad(parameter):
                parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
        if any(p.unsharded_accumulated_grad is not None for p in trainable):
            for parameter in trainable:  # torch requires one dtype
                if parameter.unsharded_accumulated_grad is None:
                    parameter.to_accumulated_grad_if_needed()

    def accumulate(self) -> None:
        """End a backward pass whose gradients are not reduced yet."""
        if self.was_gathered:
            self.post_backward()
        else:  # never gathered, which torch does not expect
            self.group._training_state = TrainingState.POST_BACKWARD

    def clear_unused_grads(self, used: list[int]) -> None:
        """Remove gradients of parameters that no rank used, as in a single process."""
        was_none = self.grad_was_none or ()
        for parameter, mark, none_before in zip(self.trainable, used, was_none, strict=False):
            if none_before and not mark:
                parameter.sharded_param.grad = None
        self.grad_was_none = None

    def free_unused_all_gather(self) -> None:
        """Free weights that were prefetched and not used, before an update makes them stale."""
        group = self.group
        if (result := group._all_gather_result) is None:
            return
        if not self.was_gathered:
            self.wait_for_unshard()
            group._to_sharded()
        else:
            if result.all_gather_event is not None:
                group.device_handle.current_stream().wait_event(result.all_gather_event)
            if result.all_gather_work is not None:
                result.all_gather_work.wait()
            group._all_gather_result = None


def units_of(model: nn.Module) -> list[tuple[str, UnitGroup]]:
    """Return the parameter groups of a sharded model, each with the class of its module."""
    return [
        (type(module).__name__.removeprefix("FSDP"), UnitGroup(group))
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in param_groups(module._get_fsdp_state())
    ]


def _has_grad(parameter: Any) -> bool:
    unsharded = getattr(parameter, "_unsharded_param", None)
    has_any = unsharded is not None and unsharded.grad is not None
    return has_any or parameter.unsharded_accumulated_grad is not None
