"""A frozen weight with two trained factors, against the same sums written out by autograd."""

import pytest
import torch
import torch.nn.functional as F

from mindspeed.ops.swiglu import gemm_swiglu, swiglu
from mindspeed.parallel.tensor import (
    BufferedWeight,
    FrozenWeight,
    low_rank_linear,
    low_rank_linear_swiglu,
    low_rank_swiglu_linear,
)
from tests.unit.ops import quack_stand_in

RANK = 3
KINDS = pytest.mark.parametrize(
    "frozen", [FrozenWeight, lambda weight: BufferedWeight(weight, RANK)], ids=["plain", "buffered"]
)


def make(sizes, has_bias, x_has_gradient):
    generator = torch.Generator().manual_seed(1)
    size_in, size_out = sizes

    def draw(*shape, requires_grad=True):
        values = torch.randn(*shape, dtype=torch.float64, generator=generator)
        return values.requires_grad_(requires_grad)

    x = draw(2, 5, size_in, requires_grad=x_has_gradient)
    weight = draw(size_out, size_in, requires_grad=False)
    bias = draw(size_out, requires_grad=False) if has_bias else None
    return x, weight, bias, draw(RANK, size_in), draw(size_out, RANK)


@pytest.mark.parametrize("sizes", [(4, 7), (7, 4), (5, 5)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("x_has_gradient", [True, False])
@KINDS
def test_values_and_gradients(sizes, has_bias, x_has_gradient, frozen):
    found, expected = (make(sizes, has_bias, x_has_gradient) for _ in range(2))
    out = low_rank_linear(found[0], frozen(found[1]), *found[2:])
    x, weight, bias, inner, outer = expected
    whole = F.linear(x, weight, bias) + F.linear(F.linear(x, inner), outer)
    assert torch.allclose(out, whole, rtol=1e-12)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    out.backward(grad)
    whole.backward(grad)
    for one, other in zip(found, expected, strict=True):
        if one is None or other.grad is None:
            assert one is None or one.grad is None
        else:
            assert torch.allclose(one.grad, other.grad, rtol=1e-12)


@pytest.mark.parametrize("sizes", [(4, 7), (7, 4), (5, 5)], ids=str)
def test_backward_of_a_call_after_which_others_ran(sizes):
    """The buffer has other factors by then, and a weight that was replaced is put there again."""
    x, weight, _, *factors = make(sizes, has_bias=False, x_has_gradient=True)
    buffered = BufferedWeight(weight, RANK)
    out = low_rank_linear(x, buffered, None, *factors)
    for change in (2.0, 3.0):
        low_rank_linear(x, buffered, None, *(change * one for one in factors)).sum().backward()
    grads = torch.autograd.grad(out.square().sum(), (x, *factors))
    plain = low_rank_linear(x, FrozenWeight(weight.clone()), None, *factors)
    expected = torch.autograd.grad(plain.square().sum(), (x, *factors))
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [(4, 7), (7, 4), (5, 5)], ids=str)
def test_a_buffered_weight_is_the_weight(sizes):
    weight = make(sizes, has_bias=False, x_has_gradient=False)[1]
    copy, size_out = weight.clone(), len(weight)
    buffered = BufferedWeight(weight, RANK)
    assert torch.equal(weight, copy) and buffered.holds(weight, RANK)
    assert not buffered.holds(weight, RANK + 1) and not buffered.holds(copy, RANK)
    outer, inner = torch.ones(size_out, RANK).double(), torch.ones(RANK, sizes[0]).double()
    assert torch.equal(buffered.beside(outer), torch.cat((copy, outer), 1))
    assert torch.equal(buffered.above(inner), torch.cat((copy, inner)))
    assert torch.equal(weight, copy)
    weight.data = copy
    assert not buffered.holds(weight, RANK), "values loaded elsewhere would be ignored"


def run(is_recomputed, frozen, values):
    """Return an output and its gradients, and the shape of what is kept of the input."""
    preact, weight, *factors = (one.detach().clone() for one in values)
    for one in (preact, *factors):
        one.requires_grad_()
    x, kept = swiglu(preact), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, _same):
        if is_recomputed:
            out = low_rank_swiglu_linear(preact, x, frozen(weight), *factors)
        else:
            out = low_rank_linear(x, frozen(weight), None, *factors)
    out.square().sum().backward()
    return kept[0], out, preact.grad, *(one.grad for one in factors)


def _same(t):
    return t


@KINDS
def test_a_swiglu_output_is_recomputed_instead_of_kept(frozen):
    _, weight, _, *factors = make((12, 7), has_bias=False, x_has_gradient=False)
    generator = torch.Generator().manual_seed(3)
    preact = torch.randn(5, 2, 24, dtype=torch.float64, generator=generator)
    recomputed, plain = (run(which, frozen, (preact, weight, *factors)) for which in (True, False))
    assert (recomputed[0], plain[0]) == ((5, 2, 24), (5, 2, 12))
    for one, other in zip(recomputed[1:], plain[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@KINDS
def test_swiglu_in_the_epilogue(monkeypatch, frozen):
    """Gate and up are interleaved in the pre-activation, and their rows are not in the weight."""
    quack_stand_in.install(monkeypatch)
    gemm_swiglu._passes_evaluation.cache_clear()
    found, expected = (make((6, 8), has_bias=False, x_has_gradient=True) for _ in range(2))
    preact, y = low_rank_linear_swiglu(found[0], frozen(found[1]), *found[3:])
    x, weight, _, inner, outer = expected
    whole = F.linear(x, weight) + F.linear(F.linear(x, inner), outer)
    torch.testing.assert_close(preact.transpose(-1, -2).flatten(-2), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y, swiglu(whole), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        none, same = low_rank_linear_swiglu(found[0], frozen(found[1].clone()), *found[3:])
    assert none is None and torch.equal(same, y)
    grad = torch.randn(whole.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    whole.backward(grad)
    preact.backward(grad.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous())
    for one, other in zip((found[0], *found[3:]), (x, inner, outer), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
