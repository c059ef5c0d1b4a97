"""Init and teardown of the process groups of a run."""

import atexit
import gc
import sys
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import distributed_c10d

from mindspeed.config import ConfigError
from mindspeed.distributed import environment
from mindspeed.distributed.parallel_dims import ParallelDims

MAX_TIMEOUT_MINUTES = 10**6
"""Two years; clocks of some backends do not count much further."""


class RankDevice(Protocol):
    """What the process groups need to know of a device; mindspeed.device.Device has it."""

    @property
    def backend(self) -> str:
        """The process-group backend native to the device."""

    def set_index(self, index: int) -> None:
        """Make one local device the current one."""


def init_distributed(
    device: RankDevice, *, timeout_minutes: int, backend: str | None = None
) -> None:
    """Init the default process group, unless that has been done, and bind this rank's device.

    The backend is the device's own unless given. One rank needs no rendezvous.
    """
    if torch.distributed.is_initialized():
        return
    world = environment.world_size()
    if world > 1:
        device.set_index(environment.local_rank())
    torch.distributed.init_process_group(
        backend or device.backend,
        rank=environment.rank(),
        world_size=world,
        timeout=_timeout(timeout_minutes),
        store=torch.distributed.HashStore() if world == 1 else None,
    )


def init_model_parallel(
    dims: ParallelDims, *, timeout_minutes: int, hierarchical_sizes: list[int] | None = None
) -> None:
    """Init Megatron's process groups, in place of those of an earlier run of the same program.

    `hierarchical_sizes` split the context-parallel ranks into groups of neighbours and groups of
    their counterparts.
    """
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    # Megatron 0.12 keeps these, and takes a rank for one of a group that is there no more.
    for name in ("_EMBEDDING_GLOBAL_RANKS", "_POSITION_EMBEDDING_GLOBAL_RANKS"):
        setattr(parallel_state, name, None)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=dims.tp,
        pipeline_model_parallel_size=dims.pp,
        virtual_pipeline_model_parallel_size=dims.vpp,
        context_parallel_size=dims.cp,
        hierarchical_context_parallel_sizes=hierarchical_sizes,
        expert_model_parallel_size=dims.ep,
        expert_tensor_parallel_size=dims.expert_tp,
        distributed_timeout_minutes=timeout_minutes,
    )
    set_collective_timeout(timeout_minutes)


def set_collective_timeout(minutes: int) -> None:
    """Give every process group of this rank the time-out of the run.

    Groups that a device mesh makes, and some of Megatron's, would wait for half an hour.
    """
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(_timeout(minutes), group)


def destroy_distributed() -> None:
    """Destroy all process groups, and end their threads.

    A thread of a group that is alive when the interpreter ends may abort the process. Groups end
    with the last reference to them: Megatron's, and those of models in cycles or in the frames of
    an error.
    """
    if not torch.distributed.is_initialized():
        return
    if (megatron := sys.modules.get("megatron.core.parallel_state")) is not None:
        megatron.destroy_model_parallel()
        for name, value in list(vars(megatron).items()):
            if isinstance(value, torch.distributed.ProcessGroup):  # which it keeps
                setattr(megatron, name, None)
    torch.distributed.destroy_process_group()
    gc.collect()
    atexit.register(_drop_last_error)


def _drop_last_error() -> None:
    """Drop the frames of an error that ended the program, once it is printed."""
    kept = [n for n in ("last_exc", "last_value", "last_traceback") if hasattr(sys, n)]
    for name in kept:
        setattr(sys, name, None)
    if kept:
        gc.collect()


def _timeout(minutes: int) -> timedelta:
    if not 1 <= minutes <= MAX_TIMEOUT_MINUTES:
        raise ConfigError(
            f"--distributed-timeout-minutes {minutes}: give 1 to {MAX_TIMEOUT_MINUTES}"
        )
    return timedelta(minutes=minutes)
