"""Seeds per rank: the random numbers of a step depend on nothing that happened before it."""

import random

import numpy as np
import torch

MAX_SEED = 2**31


def seed_everything(seed: int, step: int = 0) -> None:
    """Seed torch and Megatron's generators for a step.

    Step 0 initializes the model: ranks that hold the same weights draw the same numbers. In later
    steps every data-parallel rank draws its own.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    mixed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    if step:
        mixed += 1_000_003 * step + 10_007 * parallel_state.get_data_parallel_rank()
    mixed %= MAX_SEED
    torch.manual_seed(mixed)
    model_parallel_cuda_manual_seed(mixed)


def seed_step(seed: int, step: int, dp_rank: int) -> None:
    """Seed all generators of a step, also those that users' data sets draw from."""
    seed_everything(seed, step)
    own = (seed + 1_000_003 * step + 10_007 * dp_rank) % 2**32
    random.seed(own)
    np.random.seed(own)  # noqa: NPY002  # what data sets of users draw from
