"""Experts in one GroupedLinear: against one layer an expert, and over expert-parallel ranks."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.te_model import build, gradients, load, save, step
from tests.ranks import run_ranks

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
DISPATCH = {"moe_token_dispatcher_type": "allgather"}


def grouped_name(name):
    """Return the grouped layer's name of a parameter of separate experts."""
    head, found, rest = name.partition("local_experts.")
    if not found:
        return name
    expert, layer, kind = rest.split(".")
    return f"{head}{layer}.{kind}{expert}"


def grouped_equals_separate(shape):
    separate, grouped = build("te", shape, **DISPATCH), build("te grouped", shape, **DISPATCH)
    weights = {grouped_name(name): param for name, param in separate.named_parameters()}
    for name, param in grouped.named_parameters():
        param.data.copy_(weights.pop(name))
    assert not weights
    torch.testing.assert_close(step(grouped), step(separate), **CLOSE)
    expected = {grouped_name(name): grad for name, grad in gradients(separate).items()}
    for name, grad in gradients(grouped).items():
        torch.testing.assert_close(grad, expected[name], **CLOSE, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("shape", ["experts", "gated experts"])
def test_grouped_experts_equal_separate_ones(shape):
    run_ranks(grouped_equals_separate, 1, shape)


def step_over_ranks(folder, shape):
    model = load(folder, "te grouped", shape, ep=dist.get_world_size(), **DISPATCH)
    return step(model), gradients(model)


@pytest.mark.parametrize("shape", ["experts", "gated experts"])
def test_expert_parallel_ranks_load_the_checkpoint_of_one_and_equal_it(tmp_path, shape):
    [(losses, grads, _)] = run_ranks(save, 1, tmp_path, "te grouped", shape, DISPATCH)
    for rank, (given, parts) in enumerate(run_ranks(step_over_ranks, 2, tmp_path, shape)):
        torch.testing.assert_close(given, losses, **CLOSE)
        for name, grad in parts.items():
            head, _, tail = name.rpartition(".")
            if ".experts." in name:
                # Two of the four experts live here, and both ranks send them the same tokens.
                kind = tail.rstrip("0123456789")
                whole = f"{head}.{kind}{2 * rank + int(tail.removeprefix(kind))}"
                torch.testing.assert_close(grad, 2 * grads[whole], **CLOSE, msg=name)
            else:
                torch.testing.assert_close(grad, grads[name], **CLOSE, msg=name)
