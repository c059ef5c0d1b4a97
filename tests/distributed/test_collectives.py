"""Collectives equal their definition on the whole tensor, forward, backward and once more."""

import pytest
import torch

from tests.ranks import run_ranks

WORLD = 2
SHAPE = 4, 6, 2  # dims 0 to 2 of what every rank has


def inputs(rank):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def definition(name, wholes, rank, dims):
    """Return what a collective gives to a rank, made of the tensors of all ranks by torch alone."""
    if name == "all_gather":
        return torch.cat(wholes, dims[0])
    if name == "reduce_scatter":
        return sum(wholes).chunk(WORLD, dims[0])[rank]
    if name == "all_to_all":
        return torch.cat([whole.chunk(WORLD, dims[0])[rank] for whole in wholes], dims[1])
    return sum(wholes) if name == "all_reduce" else wholes[rank]


def run(name, dims):
    """Return a collective's value, and the gradients of a loss that squares it."""
    from mindspeed.distributed import collectives

    collective, group = getattr(collectives, name), torch.distributed.group.WORLD
    rank = torch.distributed.get_rank()
    x = inputs(rank).requires_grad_()
    value = collective(x, group, *dims)
    (gradient,) = torch.autograd.grad(value.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    with torch.no_grad():
        plain = collective(x, group, *dims)
    assert plain.grad_fn is None and torch.equal(plain, value)
    return value.detach(), gradient.detach(), second


CASES = [("all_reduce", ()), ("copy_to_group", ())]
CASES += [(name, (dim,)) for name in ("all_gather", "reduce_scatter") for dim in (0, 1, 2)]
CASES += [("all_to_all", dims) for dims in ((0, 0), (0, 1), (1, 2), (2, 0), (1, 0))]


@pytest.mark.parametrize("name, dims", CASES, ids=str)
def test_value_and_gradients(name, dims):
    found = run_ranks(run, WORLD, name, dims)
    wholes = [inputs(rank).requires_grad_() for rank in range(WORLD)]
    values = [definition(name, wholes, rank, dims) for rank in range(WORLD)]
    # All ranks have the same sum, and its gradient passes through: one of them is differentiated.
    losses = [value.square().sum() for value in values]
    loss = losses[0] if name == "all_reduce" else sum(losses)
    if name == "copy_to_group":  # each rank holds a copy of one tensor: gradients are summed
        expected = [sum(2 * whole.detach() for whole in wholes)] * WORLD
    else:
        expected = torch.autograd.grad(loss, wholes, create_graph=True)
    for rank, (value, gradient, _) in enumerate(found):
        torch.testing.assert_close(value, values[rank].detach(), rtol=0, atol=0)
        torch.testing.assert_close(gradient, expected[rank].detach(), rtol=1e-15, atol=1e-15)
    if name in ("all_gather", "reduce_scatter", "all_to_all"):
        seconds = torch.autograd.grad(sum(each.square().sum() for each in expected), wholes)
        for (_, _, second), other in zip(found, seconds):
            torch.testing.assert_close(second, other, rtol=1e-14, atol=1e-14)
