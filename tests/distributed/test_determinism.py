"""With --npu-deterministic, two runs and a resumed run give the same bits."""

import hashlib

import pytest
import torch

from tests.gpt.layout import Layout
from tests.gpt.runs import in_ranks

STEPS = 4
LAYOUTS = [Layout(dropout=0.1), Layout(dropout=0.1, tp=2, spec="te", bf16=True)]


def run(layout, folder, first, last):
    """Train from step `first` to `last`, resuming from and saving to a folder."""
    return in_ranks(layout, _train, folder, first, last)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_runs_and_resumed_runs_are_bitwise_equal(layout, tmp_path):
    whole = run(layout, tmp_path, 0, STEPS)
    assert run(layout, tmp_path, 0, STEPS) == whole
    start = run(layout, tmp_path, 0, STEPS // 2)
    rest = run(layout, tmp_path, STEPS // 2, STEPS)
    for rank, (losses, weights) in enumerate(whole):
        assert start[rank][0] + rest[rank][0] == losses
        assert rest[rank][1] == weights


def _train(training, folder, first, last):
    import mindspeed

    mindspeed.enable(npu_deterministic=True)
    if first:
        _load(training, folder / f"{torch.distributed.get_rank()}_{first}.pt")
    losses = [training.step()[0] for _ in range(first, last)]
    _save(training, folder / f"{torch.distributed.get_rank()}_{last}.pt")
    digest = hashlib.sha256()
    for parameter in training.chunks[0].parameters():
        digest.update(parameter.detach().cpu().view(torch.uint8).numpy().tobytes())
    return losses, digest.hexdigest()


def _save(training, path):
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    state = {
        "model": training.chunks[0].state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "rng": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    torch.save(state, path)


def _load(training, path):
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    state = torch.load(path, weights_only=False)  # written by this test a moment ago
    training.chunks[0].load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    torch.cuda.set_rng_state(state["rng"])
    get_cuda_rng_tracker().set_states(state["tracker"])
