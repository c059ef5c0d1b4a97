"""One copy of the parameters trains as two do, in every bit, and resumes in another layout."""

from dataclasses import replace

import pytest
import torch

import mindspeed
from tests.gpt.layout import Layout
from tests.gpt.runs import assert_same_weights
from tests.ranks import run_ranks

PLAIN = Layout("llama", num_layers=2, bf16=True, spec="te")
SHARDED = replace(PLAIN, dp=2, distributed_optimizer=True)
STEPS = 4


def _start(layout, reuses):
    from tests.gpt.training import Training

    mindspeed.enable(reuse_fp32_param=reuses)
    return Training(layout)


def _parts(training):
    return getattr(training.optimizer, "chained_optimizers", [training.optimizer])


def _parameter_bytes(training):
    """Return the bytes of parameters and what the optimizer keeps of them, moments aside."""
    storages = [param.untyped_storage() for param in training.chunks[0].parameters()]
    count = 0
    for part in _parts(training):
        tensors = [p for group in part.optimizer.param_groups for p in group["params"]]
        for state in part.optimizer.state.values():
            count += state["exp_avg"].numel()
            tensors += [v for name, v in state.items() if name not in ("exp_avg", "exp_avg_sq")]
        storages += [tensor.untyped_storage() for tensor in tensors]
    return sum({s._cdata: s.nbytes() for s in storages}.values()), count


def _train(layout, reuses):
    training = _start(layout, reuses)
    results = [training.step() for _ in range(STEPS)]
    weights = {shard.name: shard.values for shard in training.weights()}
    return results, weights, _parameter_bytes(training)


@pytest.mark.parametrize(
    "layout",
    [PLAIN, replace(PLAIN, tp=2), replace(SHARDED, overlap_grad_reduce=True)],
    ids=str,
)
def test_training_is_the_same_in_every_bit_with_four_bytes_a_parameter(layout):
    runs = [run_ranks(_train, layout.world, layout, reuses) for reuses in (False, True)]
    for plain, ours in zip(*runs, strict=True):
        assert ours[0] == plain[0]
        assert_same_weights(ours[1], plain[1])
        (before, count), (after, ours_count) = plain[2], ours[2]
        assert count == ours_count
        assert before - after == 2 * count
        if layout.dp == 1:
            assert (before, after) == (6 * count, 4 * count)


def _save(layout, reuses, folder):
    from tests.gpt import checkpoint

    training = _start(layout, reuses)
    for _ in range(2):
        training.step()
    checkpoint.save(training, folder)


def _resume(layout, reuses, folder):
    from tests.gpt import checkpoint

    training = _start(layout, reuses)
    checkpoint.load(training, folder)
    results = [training.step() for _ in range(2)]
    return results, {shard.name: shard.values for shard in training.weights()}


@pytest.mark.parametrize(
    ("before", "after"),
    [(PLAIN, PLAIN), (SHARDED, replace(SHARDED, dp=1)), (replace(SHARDED, dp=1), SHARDED)],
    ids=str,
)
def test_checkpoints_do_not_show_how_masters_are_kept(before, after, tmp_path):
    """Each kind of run resumes from the other; with another number of ranks, in the same bits."""
    resumed = []
    crossed = [(True, False), (False, True)] if before is PLAIN else []
    for saves, loads in [(False, False), (True, True), *crossed]:
        folder = tmp_path / str(saves)
        if not folder.exists():
            folder.mkdir()
            run_ranks(_save, before.world, before, saves, str(folder))
        resumed.append(run_ranks(_resume, after.world, after, loads, str(folder)))
    expected, *others = resumed
    for ranks in others:
        for (results, weights), (losses, wanted) in zip(ranks, expected, strict=True):
            assert results == losses
            assert_same_weights(weights, wanted)


def _reload():
    """Load other weights into a running training, as a new start from a checkpoint does."""
    training = _start(PLAIN, True)
    training.step()
    with torch.no_grad():
        for param in training.chunks[0].parameters():
            param.mul_(0.5)
    training.optimizer.reload_model_params()
    adam = _parts(training)[0].optimizer
    for param in training.chunks[0].parameters():
        assert torch.equal(adam.get_unscaled_state(param, "master_param"), param.detach().float())


def test_masters_follow_weights_that_are_loaded_alone():
    run_ranks(_reload, 1)
