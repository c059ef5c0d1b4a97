"""Random numbers of a step: alike where ranks share weights, of their own between data ranks."""

import torch

from tests.ranks import run_ranks


def draws(tp, pp):
    """Return what this rank draws when the model is made and in two steps: outside and inside."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from mindspeed.distributed.seeds import seed_everything

    parallel_state.initialize_model_parallel(tp, pp)
    found = {}
    for step in (0, 1, 2):
        seed_everything(1234, step)
        outside = torch.rand(4).tolist()
        with get_cuda_rng_tracker().fork():
            found[step] = outside, torch.rand(4).tolist()
    return found


def test_data_parallel_ranks_make_one_model_and_draw_their_own_dropout():
    first, second = run_ranks(draws, 2, 1, 1)
    assert first[0] == second[0]
    for step in (1, 2):
        for mine, other in zip(first[step], second[step]):
            assert mine != other
    assert len({str(first[step]) for step in first}) == 3, "every step has numbers of its own"


def test_tensor_parallel_ranks_share_what_is_not_cut():
    first, second = run_ranks(draws, 2, 2, 1)
    for step in first:
        assert first[step][0] == second[step][0] and first[step][1] != second[step][1]


def test_pipeline_stages_differ():
    first, second = run_ranks(draws, 2, 1, 2)
    assert all(first[step][0] != second[step][0] for step in first)
