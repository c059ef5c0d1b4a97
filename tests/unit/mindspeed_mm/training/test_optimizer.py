"""Which parameters of a model are updated, and which of them decay."""

import pytest
import torch
from torch import nn

from mindspeed.config import ConfigError
from mindspeed.training.options import RunOptions
from mindspeed_mm.training.optimizer import make_optimizer, make_state


def model():
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4))


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_matrices_decay_and_vectors_do_not(kind):
    whole = model()
    whole[0].requires_grad_(False)
    optimizer = make_optimizer(whole, RunOptions(lr=0.1, optimizer=kind))
    decays = {p: group["wd_mult"] for group in optimizer.param_groups for p in group["params"]}
    vectors = [whole[1].bias, whole[2].weight, whole[2].bias]
    assert decays == {whole[1].weight: 1.0} | dict.fromkeys(vectors, 0.0)


def test_nothing_to_train_is_an_error():
    with pytest.raises(ConfigError, match="every parameter of the model is frozen"):
        make_optimizer(model().requires_grad_(False), RunOptions(lr=0.1))


def test_making_the_state_changes_no_weight():
    whole = model()
    optimizer = make_optimizer(whole, RunOptions(lr=0.1))
    before = [p.detach().clone() for p in whole.parameters()]
    make_state(optimizer)
    assert all(map(torch.equal, before, whole.parameters()))
    assert len(optimizer.state) == len(before)
