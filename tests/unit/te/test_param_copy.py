"""What FusedAdam is given to write, and what is left to Megatron."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed.te.pytorch.optimizers import FusedAdam
from mindspeed.te.pytorch.optimizers.param_copy import (
    wrap_copy_main_params,
    wrap_step_with_ready_grads,
)


class Quantized(torch.Tensor):
    """A parameter that Megatron does not simply copy to."""


def step(model, adam, **config):
    """Take a step; return what Adam was given, and what Megatron's copy had left to do."""
    mains = [param.detach().float() for param in model]
    given, left = [], []

    def step_with_ready_grads(self):
        given.extend(self.optimizer.copies.values() if isinstance(adam, FusedAdam) else [])
        self.optimizer.copied = set(getattr(adam, "copies", ()))
        copy(self)
        return True

    def copy_main_params(self):
        left.extend(param for group in self.float16_groups for param in group)

    copy = wrap_copy_main_params(copy_main_params)
    optimizer = SimpleNamespace(
        optimizer=adam,
        config=SimpleNamespace(**config),
        float16_groups=[model[:1], model[1:]],
        fp32_from_float16_groups=[mains[:1], mains[1:]],
    )
    assert wrap_step_with_ready_grads(step_with_ready_grads)(optimizer)
    assert optimizer.float16_groups == [model[:1], model[1:]]
    assert optimizer.fp32_from_float16_groups == [mains[:1], mains[1:]]
    return given, left


def parameters():
    return [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(3)]


def is_same(found, params):
    return [t.data_ptr() for t in found] == [param.data_ptr() for param in params]


def test_adam_gets_all_parameters():
    model = parameters()
    adam = FusedAdam([torch.zeros(1)])
    given, left = step(model, adam)
    assert is_same(given, model)
    assert left == []
    assert (adam.copies, adam.copied) == ({}, set())


def test_quantized_parameters_are_left_to_megatron():
    model = parameters()
    model[1] = torch.ones(3, dtype=torch.bfloat16).as_subclass(Quantized)
    given, left = step(model, FusedAdam([torch.zeros(1)]))
    assert is_same(given, [model[0], model[2]])
    assert is_same(left, [model[1]])


@pytest.mark.parametrize(
    ("adam", "config"),
    [
        (torch.optim.SGD([torch.zeros(1)]), {}),
        (FusedAdam([torch.zeros(1)], master_weights=True), {}),
        (FusedAdam([torch.zeros(1)]), {"reuse_grad_buf_for_mxfp8_param_ag": True}),
    ],
    ids=["another optimizer", "masters", "gradients in the memory of parameters"],
)
def test_all_are_left_to_megatron(adam, config):
    model = parameters()
    given, left = step(model, adam, **config)
    assert given == []
    assert is_same(left, model)


def test_nothing_is_kept_after_a_step_that_fails():
    adam = FusedAdam([torch.zeros(1)])
    optimizer = SimpleNamespace(
        optimizer=adam,
        config=SimpleNamespace(),
        float16_groups=[parameters()],
        fp32_from_float16_groups=[parameters()],
    )

    def fail(self):
        assert self.optimizer.copies
        self.optimizer.copied = set(self.optimizer.copies)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        wrap_step_with_ready_grads(fail)(optimizer)
    assert (adam.copies, adam.copied) == ({}, set())
