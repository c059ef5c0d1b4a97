"""Whole GPTs on mindspeed.te: against the local spec, over ranks, through checkpoints."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.te_model import (
    build,
    gathered,
    gradients,
    load,
    local_name,
    save,
    step,
)
from tests.ranks import run_ranks

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], **CLOSE, msg=f"{name}: {{}}".format)


def copy_weights(te, local):
    """Give the local model the weights of the other one."""
    weights = {local_name(name): param for name, param in te.named_parameters()}
    for name, param in local.named_parameters():
        param.data.copy_(weights.pop(name))
    assert not weights


def specs_agree(shape, options):
    te, local = build("te", shape, **options), build("local", shape, seed=4, **options)
    copy_weights(te, local)
    torch.testing.assert_close(step(te), step(local), **CLOSE)
    ours = {local_name(name): grad for name, grad in gradients(te).items()}
    assert_same(ours, gradients(local))


@pytest.mark.parametrize(
    "shape, options",
    [
        ("gpt2", {}),
        ("gpt2", {"layernorm_zero_centered_gamma": True}),
        ("llama", {}),
        (
            "llama",
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
        ),
    ],
    ids=["gpt2", "zero-centred gamma", "llama", "recompute"],
)
def test_te_spec_equals_local_spec(shape, options):
    run_ranks(specs_agree, 1, shape, options)


def load_and_step(folder, spec, shape, options):
    model = load(folder, spec, shape, tp=dist.get_world_size(), **options)
    losses = step(model)
    weights = {name: param.detach() for name, param in model.named_parameters()}
    return losses, gathered(model, gradients(model)), gathered(model, weights)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_two_ranks_load_the_checkpoint_of_one_and_equal_it(tmp_path, shape, sequence_parallel):
    [(losses, grads, weights)] = run_ranks(save, 1, tmp_path, "te", shape)
    options = {"sequence_parallel": sequence_parallel}
    for rank in run_ranks(load_and_step, 2, tmp_path, "te", shape, options):
        torch.testing.assert_close(rank[0], losses, **CLOSE)
        assert_same(rank[1], grads)
        assert all(torch.equal(rank[2][name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
@pytest.mark.parametrize("saved, loaded", [("te", "local"), ("local", "te")])
def test_checkpoints_go_both_ways(tmp_path, saved, loaded, shape):
    [(losses, _, weights)] = run_ranks(save, 1, tmp_path, saved, shape)
    [(again, _, others)] = run_ranks(load_and_step, 1, tmp_path, loaded, shape, {})
    weights = {local_name(name): weight for name, weight in weights.items()}
    others = {local_name(name): weight for name, weight in others.items()}
    assert weights.keys() == others.keys()
    assert all(torch.equal(others[name], weight) for name, weight in weights.items())
    torch.testing.assert_close(again, losses, **CLOSE)
