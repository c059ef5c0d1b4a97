"""One FSDP2 parameter group, and what a rank does in its collectives without using it.

This is the only place that knows torch's FSDPParamGroup; what it names is there from 2.7 to 2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def in_backward() -> bool:
    """Tell whether autograd is running a backward pass, a recomputed forward in it included."""
    return torch._C._current_graph_task_id() != -1


class UnitGroup:
    """A parameter group with its own methods, kept from before they were replaced."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.unshard, self.wait = group.unshard, group.wait_for_unshard
        self.post_backward, self.post_forward = group.post_backward, group.post_forward
        self.awaited = 0
        """Forward passes of this rank whose backward pass is still to come."""
        self.was_none: list[bool] | None = None
        """Which parameters had no gradient before this backward pass reduced any."""

    @property
    def is_gathered(self) -> bool:
        """Whether the weights are here or on their way."""
        return self.group.is_unsharded or self.group._all_gather_result is not None

    @property
    def gathers(self) -> bool:
        """Whether unshard would begin a collective."""
        group = self.group
        is_backward = group._training_state == TrainingState.PRE_BACKWARD
        return not self.is_gathered and (group.unshard_in_backward or not is_backward)

    @property
    def is_known(self) -> bool:
        """Whether the weights were whole here before, without which nothing can be reduced."""
        return all(hasattr(p, "_unsharded_param") for p in self.group.fsdp_params)

    @property
    def is_needed(self) -> bool:
        """Whether this rank is in the group, or its backward pass will come to it."""
        inside = (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)
        return self.awaited > 0 or self.group._training_state in inside

    @property
    def trained(self) -> list[Any]:
        """The parameters that take part in every reduction."""
        return [p for p in self.group.fsdp_params if p.sharded_param.requires_grad]

    def real(self) -> list[bool]:
        """Return which of the trained parameters have a gradient of this rank."""
        return [_has_gradient(parameter) for parameter in self.trained]

    def join_gather(self, is_backward: bool, is_part: bool) -> None:
        """Take part in a gather that this rank did not ask for; keep what it will need."""
        group = self.group
        if self.is_gathered or (group.is_sharded_post_forward and not is_part):
            self._contribute(is_part)
        elif is_backward:
            with group.use_training_state(TrainingState.PRE_BACKWARD):
                self.unshard(group.unshard_async_op)
                if not self.is_needed:
                    self.wait()
                    group._to_sharded()
        else:
            with group.use_training_state(TrainingState.FORWARD):
                self.unshard(False)
                self.wait()
                group.reshard()  # or not, as after its own forward

    def _contribute(self, is_part: bool) -> None:
        """Give this rank's shard to the others; the weights here stay as they are."""
        group = self.group
        mesh = group.post_forward_mesh_info if is_part else group.mesh_info
        ranks = getattr(mesh, "shard_process_group", None)
        if ranks is None or ranks.size() == 1:
            return
        name = "_sharded_post_forward_param_data" if is_part else "_sharded_param_data"
        shards = [getattr(parameter, name) for parameter in group.fsdp_params]
        types = {p.param_dtype or s.dtype for p, s in zip(group.fsdp_params, shards, strict=True)}
        given = [
            shard.to(group.device, parameter.param_dtype or shard.dtype)
            for parameter, shard in zip(group.fsdp_params, shards, strict=True)
        ]
        if len(types) > 1:
            given = [shard.view(torch.uint8) for shard in given]
        flat = torch.cat(given)
        dist.all_gather_into_tensor(flat.new_empty(flat.numel() * ranks.size()), flat, group=ranks)

    def reduce(self) -> None:
        """Reduce the gradients of all trained parameters, zeros where this rank has none."""
        if self.was_none is None:
            self.was_none = [p.sharded_param.grad is None for p in self.trained]
        self._fill()
        self.post_backward()

    def join_reduce(self) -> None:
        """Take part in a reduction that this rank did not ask for."""
        if not self.is_needed:
            self.reduce()  # with what earlier micro-batches left, if anything
            return
        group = self.group
        if group.is_sharded_post_forward and not self.is_gathered:
            # The others leave that state: what is gathered from now on comes from all shards.
            group._to_sharded()
        with self._kept_aside(), group.use_training_state(group._training_state):
            self.reduce()

    @contextmanager
    def _kept_aside(self) -> Iterator[None]:
        """Keep gradients that are still growing, and the weights that they need."""
        group = self.group
        kept = [(p, p.unsharded_accumulated_grad, p.unsharded_param.grad) for p in self.trained]
        reshard, group.reshard_after_backward = group.reshard_after_backward, False
        for parameter, _, _ in kept:
            parameter.unsharded_accumulated_grad = parameter.unsharded_param.grad = None
        try:
            yield
        finally:
            group.reshard_after_backward = reshard
            for parameter, accumulated, gradient in kept:
                parameter.unsharded_accumulated_grad = accumulated
                parameter.unsharded_param.grad = gradient

    @torch.no_grad()
    def _fill(self) -> None:
        trained = self.trained
        for parameter in trained:
            if not _has_gradient(parameter):
                parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
        if any(p.unsharded_accumulated_grad is not None for p in trained):
            for parameter in trained:  # torch wants one type
                if parameter.unsharded_accumulated_grad is None:
                    parameter.to_accumulated_grad_if_needed()

    def accumulate(self) -> None:
        """End a backward pass whose gradients are not reduced yet."""
        if self.is_known:
            self.post_backward()
        else:  # never gathered, which torch does not expect
            self.group._training_state = TrainingState.POST_BACKWARD

    def forget(self, used: list[int]) -> None:
        """Take the gradients away that no rank had, as one process would have none."""
        for parameter, mark, was_none in zip(self.trained, used, self.was_none or (), strict=False):
            if was_none and not mark:
                parameter.sharded_param.grad = None
        self.was_none = None

    def drop(self) -> None:
        """Free what was gathered ahead and not used, before an update makes it stale."""
        group = self.group
        if (result := group._all_gather_result) is None:
            return
        if not self.is_known:
            self.wait()
            group._to_sharded()
        else:
            if result.all_gather_event is not None:
                group.device_handle.current_stream().wait_event(result.all_gather_event)
            if result.all_gather_work is not None:
                result.all_gather_work.wait()
            group._all_gather_result = None


def _has_gradient(parameter: Any) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)
    has_any = whole is not None and whole.grad is not None
    return has_any or parameter.unsharded_accumulated_grad is not None
