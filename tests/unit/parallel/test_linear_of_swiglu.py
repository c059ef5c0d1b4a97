"""A product with a SwiGLU output keeps the input of SwiGLU alone, and computes the same."""

import pytest
import torch

from mindspeed.ops.swiglu import swiglu
from mindspeed.ops.swiglu.origin import origin, remember
from mindspeed.parallel.tensor import linear


def draw(dtype=torch.float64):
    torch.manual_seed(3)
    x = torch.randn(5, 2, 24, dtype=dtype, requires_grad=True)
    return x, torch.randn(7, 12, dtype=dtype, requires_grad=True)


def run(note, **options):
    x, weight = draw()
    y = swiglu(x)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = linear(note(y, x), weight, **options)
    out.square().sum().backward()
    return out, x.grad, weight.grad, kept


def test_values_and_gradients_are_those_of_the_plain_product():
    *noted, kept = run(remember)
    *plain, kept_plain = run(lambda y, x: y)
    for one, other in zip(noted, plain):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert [tuple(each.shape) for each in kept] == [(5, 2, 24), (7, 12)]
    assert [tuple(each.shape) for each in kept_plain] == [(5, 2, 12), (7, 12)]


def test_gradcheck():
    x, weight = draw()
    assert torch.autograd.gradcheck(lambda x, w: linear(remember(swiglu(x), x), w), (x, weight))


def test_a_changed_output_is_not_computed_again():
    x, _ = draw()
    y = remember(swiglu(x), x)
    assert origin(y) is x
    assert origin(y * 1) is None
    y.mul_(2)
    assert origin(y) is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_backward_nothing_is_noted(mode):
    x, weight = draw()
    with mode():
        y = remember(swiglu(x), x)
        assert origin(y) is None
        torch.testing.assert_close(linear(y, weight), y @ weight.t())


def test_main_grad_takes_the_weight_gradient():
    x, weight = draw(torch.float32)
    weight.main_grad = torch.zeros_like(weight)
    out = linear(remember(swiglu(x), x), weight, fused=True)
    out.square().sum().backward()
    plain_x, plain_weight = draw(torch.float32)
    torch.nn.functional.linear(swiglu(plain_x), plain_weight).square().sum().backward()
    torch.testing.assert_close(weight.main_grad, plain_weight.grad)
    torch.testing.assert_close(x.grad, plain_x.grad)
