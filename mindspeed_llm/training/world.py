"""This process among the ranks: where it stands, and the groups it belongs to."""

import logging
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d

from mindspeed import device
from mindspeed.config import ConfigError, Spelling, build
from mindspeed.features.activation import current
from mindspeed.features.base import Context
from mindspeed_llm.models.shape import ModelShape
from mindspeed_llm.training.options import TrainOptions

logger = logging.getLogger(__name__)

LARGEST_SEED = 2**31
MOST_MICRO_BATCHES = 100_000
"""A step of more would not end in a day: a number with too many zeros."""
MOST_MINUTES = 10**6
"""Two years; clocks of some backends do not count much further."""


@dataclass(frozen=True)
class Layout:
    """How the ranks of a run share the work."""

    world: int
    rank: int
    tp: int
    pp: int
    dp: int
    virtual_stages: int | None
    micro_batches: int
    """Micro-batches of one data-parallel rank in a step."""
    global_batch: int


def plan_layout(options: TrainOptions, shape: ModelShape) -> Layout:
    """Check that the ranks can hold the model and share the batch."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    layers = shape.num_layers + len(options.noop_layers)
    known = options.model_dump() | {
        "world_size": world,
        "num_layers": layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "group_query_attention": True,
        "swiglu": True,  # as in every family here, asked for by a flag or not
        "normalization": "RMSNorm",
    }
    activation = current()
    fields = activation.registry.options_class.model_fields
    features = {name: getattr(options, name) for name in fields}
    given = build(activation.registry.options_class, features)
    activation.activate(given, Context(Spelling.FLAG, megatron=known))
    tp, pp = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    if world % (tp * pp):  # with one rank Megatron's features that check this are not in use
        raise ConfigError(
            f"{world} rank(s) cannot hold --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp}: start a multiple of {tp * pp} ranks"
        )
    for what, size in (
        ("key and value heads", shape.num_query_groups),
        ("columns of its MLPs", shape.ffn_hidden_size),
    ):
        if size % tp:
            raise ConfigError(
                f"--tensor-model-parallel-size {tp}: the model's {size} {what} cannot be shared by "
                f"{tp} ranks: use a divisor of {size}"
            )
    _check_expert_ranks(options, shape, world)
    dp = world // (tp * pp)
    batch, micro_batches = share_batch(options.global_batch_size, options.micro_batch_size, dp)
    stages = _virtual_stages(options, layers, micro_batches)
    return Layout(world, rank, tp, pp, dp, stages, micro_batches, batch)


def check_experts(options: TrainOptions, shape: ModelShape) -> None:
    """Refuse to train a mixture of experts in a way that Megatron does not."""
    tp, is_split = options.tensor_model_parallel_size, options.sequence_parallel
    if shape.moe is not None and tp > 1 and not is_split:
        raise ConfigError(
            f"--tensor-model-parallel-size {tp}: a mixture of experts is trained with tensor "
            "parallelism only if ranks also share the sequence: add --sequence-parallel, or use 1"
        )


def share_batch(global_batch: int | None, micro_batch: int, dp: int) -> tuple[int, int]:
    """Return the samples of a step, and the micro-batches of one data-parallel rank in it."""
    step = micro_batch * dp
    batch = global_batch or step
    micro_batches, rest = divmod(batch, step)
    if rest or not micro_batches:
        raise ConfigError(
            f"--global-batch-size {batch} is not a multiple of {step} (--micro-batch-size "
            f"{micro_batch} x {dp} data-parallel ranks): use {step} or a multiple"
        )
    if micro_batches > MOST_MICRO_BATCHES:
        raise ConfigError(
            f"--global-batch-size {batch}: one step would be {micro_batches:,} micro-batches of a "
            f"rank: use at most {MOST_MICRO_BATCHES * step}"
        )
    return batch, micro_batches


def _check_expert_ranks(options: TrainOptions, shape: ModelShape, world: int) -> None:
    ep, pp = options.expert_model_parallel_size, options.pipeline_model_parallel_size
    if ep == 1:
        return
    flag, experts = f"--expert-model-parallel-size {ep}", shape.moe.num_experts if shape.moe else 0
    if not experts:
        raise ConfigError(f"{flag}: the model has no experts: use 1")
    if experts % ep:
        raise ConfigError(f"{flag}: does not divide the model's {experts} experts")
    tp = options.tensor_model_parallel_size
    if world % (tp * pp * ep):
        raise ConfigError(
            f"{flag}: {world} rank(s) cannot share experts by {ep} and each of them by "
            f"--tensor-model-parallel-size {tp}, in {pp} pipeline stage(s): start a multiple of "
            f"{tp * pp * ep} ranks"
        )


def _virtual_stages(options: TrainOptions, layers: int, micro_batches: int) -> int | None:
    """Return how many smaller stages a pipeline rank holds, if it holds several."""
    pp, size = options.pipeline_model_parallel_size, options.num_layers_per_virtual_pipeline_stage
    if size is None or pp == 1:
        return None
    flag = f"--num-layers-per-virtual-pipeline-stage {size}"
    stages, rest = divmod(layers // pp, size) if size > 0 else (0, 1)
    if rest or not stages:
        raise ConfigError(f"{flag} does not divide the {layers // pp} layers of a pipeline rank")
    if stages > 1 and micro_batches % pp:
        raise ConfigError(
            f"{flag}: the {micro_batches} micro-batches of a step are not a multiple of "
            f"--pipeline-model-parallel-size {pp}: raise --global-batch-size"
        )
    return stages if stages > 1 else None


def join(options: TrainOptions, layout: Layout) -> None:
    """Meet the other ranks and form Megatron's groups."""
    from megatron.core import parallel_state

    meet(options.distributed_timeout_minutes)
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.virtual_stages,
        expert_model_parallel_size=options.expert_model_parallel_size,
        distributed_timeout_minutes=options.distributed_timeout_minutes,
    )
    limit_waits(options.distributed_timeout_minutes)


def limit_waits(timeout_minutes: int) -> None:
    """Give every group of this rank the time-out of the run.

    Groups that a device mesh makes, and some of Megatron's, would wait for half an hour.
    """
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(_longest_wait(timeout_minutes), group)


def meet(timeout_minutes: int, backend: str | None = None) -> None:
    """Meet the other ranks, if that has not been done; the device decides how they talk."""
    if torch.distributed.is_initialized():
        return
    here = device.current()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        here.set_index(int(os.environ.get("LOCAL_RANK", "0")))
    alone = {"store": torch.distributed.HashStore()} if world == 1 else {}
    torch.distributed.init_process_group(
        backend or here.backend,
        rank=rank,
        world_size=world,
        timeout=_longest_wait(timeout_minutes),
        **alone,
    )


def _longest_wait(minutes: int) -> timedelta:
    if not 1 <= minutes <= MOST_MINUTES:
        raise ConfigError(f"--distributed-timeout-minutes {minutes}: give 1 to {MOST_MINUTES}")
    return timedelta(minutes=minutes)


def seed_everything(seed: int, step: int = 0) -> None:
    """Seed the random numbers of a step: they depend on nothing that happened before it.

    Step 0 is the making of the model. Ranks that hold the same weights make them alike; in later
    steps the data-parallel ranks draw numbers of their own.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    mixed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    if step:
        mixed += 1_000_003 * step + 10_007 * parallel_state.get_data_parallel_rank()
    mixed %= LARGEST_SEED
    torch.manual_seed(mixed)
    model_parallel_cuda_manual_seed(mixed)
