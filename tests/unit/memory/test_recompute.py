"""Placeholders for tensors that backward computes again."""

import gc
import weakref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from mindspeed.memory.recompute import Recompute, is_kept


def gelu(x, bias):
    return torch.nn.functional.silu(x + bias) * x


def run(recomputes, outer=None, twice=False):
    """Return the gradients of a small function, and how often its recomputed part ran."""
    torch.manual_seed(0)
    x, bias, weight = (torch.randn(n, 6, requires_grad=True) for n in (4, 1, 6))
    calls = []

    def function(*inputs):
        calls.append(len(inputs))
        return gelu(*inputs)

    with saved_tensors_hooks(*outer) if outer else torch.enable_grad():
        hidden = x * 2
        if recomputes:
            recompute = Recompute(function, hidden, bias)
            with recompute.of_function():
                y = function(hidden, bias)
            with recompute.of_output(y):
                out = y @ weight + y[1:2] @ weight.t()
        else:
            y = function(hidden, bias)
            out = y @ weight + y[1:2] @ weight.t()
    assert is_kept(y)
    for retain in [True, False] if twice else [False]:
        out.square().sum().backward(retain_graph=retain)
    return [x.grad, bias.grad, weight.grad], len(calls)


@pytest.mark.parametrize("twice", [False, True])
def test_gradients_are_the_same_and_one_run_serves_all_placeholders(twice):
    plain, _ = run(False, twice=twice)
    ours, calls = run(True, twice=twice)
    assert all(map(torch.equal, ours, plain))
    assert calls == 1 + (2 if twice else 1)


def test_hooks_around_it_see_inputs_and_no_placeholder():
    seen = {False: [], True: []}

    def outer(recomputes):
        return lambda t: seen[recomputes].append(t.detach()) or t, lambda t: t * 1

    plain, _ = run(False, outer(False))
    ours, _ = run(True, outer(True))
    assert all(map(torch.equal, ours, plain))
    storages = {each: {t.untyped_storage()._cdata for t in seen[each]} for each in seen}
    assert len(storages[True]) < len(storages[False])


def test_no_cycle_keeps_the_input_alive():
    gc.collect()
    gc.disable()
    try:
        x = torch.ones(3, requires_grad=True) * 2
        died = weakref.ref(x)
        recompute = Recompute(torch.exp, x)
        with recompute.of_function():
            y = torch.exp(x)
        with recompute.of_output(y):
            out = y * y
        del x, y, recompute
        out.sum().backward()
        del out
        assert died() is None
    finally:
        gc.enable()


def test_empty_tensors_are_distinguished():
    """All of them have the same address."""
    x = torch.randn(0, 4, requires_grad=True)
    other = torch.randn(3, 0, requires_grad=True)
    y = x * 2
    with Recompute(lambda x: x * 2, x).of_output(y):
        z = (y @ torch.ones(4, 2)).sum() + (other @ torch.ones(0, 2).requires_grad_()).sum()
    z.backward()
    assert other.grad.shape == (3, 0) and x.grad.shape == (0, 4)


def test_an_output_that_is_used_elsewhere_stays():
    x = torch.randn(4, requires_grad=True)
    y = x * 3
    with Recompute(lambda x: x * 3, x).of_output(y):
        out = (y * y).sum()
    assert torch.equal(y.detach(), x.detach() * 3)
    out.backward()
    assert torch.equal(x.grad, 2 * 3 * y.detach())
