"""The ranks of a run: how they meet, which share a sequence, which draw other data."""

import os
import random
from dataclasses import dataclass

import numpy as np

from mindspeed import device
from mindspeed_llm.training.world import meet, seed_everything, share_batch
from mindspeed_mm.training.checks import reaches_host
from mindspeed_mm.training.options import MmOptions


@dataclass(frozen=True)
class Layout:
    """How the ranks share a step."""

    world: int
    rank: int
    cp: int
    """Ranks that share each sequence."""
    dp: int
    dp_rank: int
    micro_batches: int
    """Micro-batches of one rank in a step."""
    micro_batch: int
    global_batch: int


def plan_layout(options: MmOptions) -> Layout:
    """Work out how the ranks share the batch; neighbours share a sequence."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    cp, size = options.context_parallel_size, options.micro_batch_size
    dp = world // cp
    batch, micro_batches = share_batch(options.global_batch_size, size, dp)
    return Layout(world, rank, cp, dp, rank // cp, micro_batches, size, batch)


def join(options: MmOptions) -> None:
    """Meet the other ranks and form Megatron's groups, which callbacks may ask for."""
    from megatron.core import parallel_state

    here = device.current()
    backend = None
    if here.name != "cpu" and reaches_host(options.distributed_backend):
        backend = f"{here.name}:{here.backend},cpu:{device.known()['cpu'].backend}"
    meet(options.distributed_timeout_minutes, backend)
    if parallel_state.model_parallel_is_initialized():  # by an earlier run of the same program
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        context_parallel_size=options.context_parallel_size,
        distributed_timeout_minutes=options.distributed_timeout_minutes,
    )


def seed_step(seed: int, step: int, dp_rank: int) -> None:
    """Seed all random numbers of a step: they depend on nothing that happened before it."""
    seed_everything(seed, step)
    own = (seed + 1_000_003 * step + 10_007 * dp_rank) % 2**32
    random.seed(own)
    np.random.seed(own)  # noqa: NPY002  # what data sets of users draw from
