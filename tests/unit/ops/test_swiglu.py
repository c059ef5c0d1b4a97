import importlib

import pytest
import torch

from mindspeed.ops import npu_swiglu
from mindspeed.ops.swiglu import (
    silu_mul,
    swiglu,
    swiglu_gradient,
    weighted_swiglu_gradient,
)


def reference(x, dim=-1, bias=None, weights=None):
    x = x.double() if bias is None else x.double() + bias.double()
    gate, up = x.chunk(2, dim=dim)
    y = gate / (1 + torch.exp(-gate)) * up
    return y if weights is None else y * weights.double()


@pytest.mark.parametrize(("shape", "dim"), [((6,), 0), ((3, 42), -1), ((2, 6, 5), 1), ((4, 3), 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_matches_float64(shape, dim, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype)
    y = npu_swiglu(x, dim)
    assert y.dtype == dtype
    assert y.shape == reference(x, dim).shape
    # One rounding in a low-precision type, several in float32 and float64.
    torch.testing.assert_close(
        y.double(),
        reference(x, dim),
        rtol=(1 if dtype.itemsize == 2 else 4) * torch.finfo(dtype).eps,
        atol=1e-12,
    )


def test_gradient():
    x = torch.randn(3, 4, 10, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(10, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 4, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, x)
    assert torch.autograd.gradcheck(lambda t: swiglu(t, 1), x)
    assert torch.autograd.gradcheck(
        lambda x, bias, weights: swiglu(x, bias=bias, weights=weights), (x, bias, weights)
    )
    # Not contiguous as well.
    assert torch.autograd.gradcheck(lambda t: swiglu(t.transpose(0, 1)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_gradient_matches_float64(dtype):
    torch.manual_seed(1)
    x = torch.randn(7, 24).to(dtype).requires_grad_()
    grad = torch.randn(7, 12).to(dtype)
    swiglu(x).backward(grad)
    exact = x.detach().double().requires_grad_()
    reference(exact).backward(grad.double())
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("with_weights", [False, True], ids=["plain", "weights"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("shape", [(3, 42), (2, 2, 2100), (5, 2), (0, 8)], ids=str)
def test_kernel_equals_float64(shape, with_bias, with_weights):
    from mindspeed.ops.swiglu import triton_impl

    torch.manual_seed(2)
    # Every other column of a wider tensor: not contiguous.
    x = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2].requires_grad_()
    extra = {}
    if with_bias:
        extra["bias"] = torch.randn(shape[-1], requires_grad=True)
    if with_weights:
        extra["weights"] = torch.rand(*shape[:-1], 1, requires_grad=True)
    grad = torch.randn(*shape[:-1], shape[-1] // 2)
    inputs = [x, *extra.values()]
    y = triton_impl.swiglu(x, **extra)
    got = torch.autograd.grad(y, inputs, grad)
    exact = reference(x, -1, **extra)
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-6)
    want = torch.autograd.grad(exact, inputs, grad.double())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("shape", "dim"), [((2, 6, 5), 1), ((4, 3), 0), ((2, 2, 3, 4), 1)])
def test_kernel_halves_any_dimension(shape, dim):
    from mindspeed.ops.swiglu import triton_impl

    torch.manual_seed(3)
    x = torch.randn(shape, requires_grad=True)
    y = triton_impl.swiglu(x, dim)
    (got,) = torch.autograd.grad(y.square().sum(), x)
    exact = reference(x, dim)
    (want,) = torch.autograd.grad(exact.square().sum(), x)
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "triton_impl"])
def test_only_the_inputs_are_saved(implementation):
    saved = []
    function = importlib.import_module(f"mindspeed.ops.swiglu.{implementation}").swiglu
    x = torch.randn(4, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.randn(2, 5)}, "two halves, got size 5"),
        ({"x": torch.randn(2, 4), "dim": 2}, "dim 2 for x of 2 dimensions"),
        ({"x": torch.ones(2, 4, dtype=torch.long)}, "floating-point numbers, got torch.int64"),
        ({"x": torch.randn(2, 4), "bias": torch.randn(2)}, r"bias of shape \(4,\).*got \(2,\)"),
        ({"x": torch.randn(2, 4), "weights": torch.randn(2)}, r"weights of shape \(2, 1\)"),
        ({"x": torch.randn(2, 4), "dim": 0, "bias": torch.randn(4)}, "last dimension only, got 0"),
    ],
)
def test_illegal_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        swiglu(**arguments)


@pytest.mark.parametrize("implementation", ["reference", "triton_impl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_and_output_in_one(implementation, dtype):
    module = importlib.import_module(f"mindspeed.ops.swiglu.{implementation}")
    torch.manual_seed(2)
    x = torch.randn(3, 5, 46).to(dtype).requires_grad_()
    grad = torch.randn(5, 3, 23).to(dtype).transpose(0, 1)
    grad_x, y = module.swiglu_gradient(grad, x.detach())
    exact = x.detach().double().requires_grad_()
    reference(exact).backward(grad.double())
    rtol = torch.finfo(dtype).eps
    torch.testing.assert_close(grad_x.double(), exact.grad, rtol=rtol, atol=1e-6)
    torch.testing.assert_close(y.double(), reference(x.detach()), rtol=4 * rtol, atol=1e-6)
    assert swiglu_gradient(grad, x.detach())[0].dtype == y.dtype == dtype


@pytest.mark.parametrize("implementation", ["reference", "triton_impl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weighted_gradient_and_output_in_one(implementation, dtype):
    module = importlib.import_module(f"mindspeed.ops.swiglu.{implementation}")
    torch.manual_seed(4)
    x, grad, weights = torch.randn(5, 2600).to(dtype), torch.randn(5, 1300).to(dtype), torch.rand(5)
    grad_x, y, grad_weights = module.weighted_swiglu_gradient(grad, x, weights.unsqueeze(1))
    exact, factors = x.double().requires_grad_(), weights.double().requires_grad_()
    expected = reference(exact) * factors.unsqueeze(1)
    expected.backward(grad.double())
    rtol = torch.finfo(dtype).eps
    torch.testing.assert_close(grad_x.double(), exact.grad, rtol=2 * rtol, atol=1e-6)
    torch.testing.assert_close(y.double(), expected.detach(), rtol=4 * rtol, atol=1e-6)
    torch.testing.assert_close(grad_weights[:, 0].double(), factors.grad, rtol=1e-5, atol=1e-4)
    assert weighted_swiglu_gradient(grad, x, weights.unsqueeze(1))[1].dtype == y.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 300), (0, 4)], ids=str)
@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
def test_two_tensors_match_float64(shape, dtype, kernel):
    function = silu_mul
    if kernel:
        function = importlib.import_module("mindspeed.ops.swiglu.triton_impl").silu_mul
    torch.manual_seed(3)
    # One of them with other strides than the other.
    gate = torch.randn(shape[::-1], dtype=dtype).movedim(-1, 0).reshape(shape).requires_grad_()
    up = torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2].requires_grad_()
    grad = torch.randn(shape, dtype=dtype)
    y = function(gate, up)
    got = torch.autograd.grad(y, (gate, up), grad)
    exact = reference(torch.cat([gate, up], -1))
    want = torch.autograd.grad(exact, (gate, up), grad.double())
    step = torch.finfo(dtype).eps
    for one, other in zip((y, *got), (exact, *want)):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other.double(), rtol=4 * step, atol=4 * step)


def test_two_tensors_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one shape and type"):
        silu_mul(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(ValueError, match="floating-point"):
        silu_mul(torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32))
