import pytest
import torch

from mindspeed.ops.swiglu import swiglu


def reference(x):
    gate, up = x.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


@pytest.mark.parametrize("shape", [(6,), (3, 42), (2, 5, 124)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_matches_float64(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype)
    y = swiglu(x)
    assert y.dtype == dtype
    assert y.shape == (*shape[:-1], shape[-1] // 2)
    # One rounding in a low-precision type, several in float32 and float64.
    torch.testing.assert_close(
        y.double(),
        reference(x),
        rtol=(1 if dtype.itemsize == 2 else 4) * torch.finfo(dtype).eps,
        atol=1e-12,
    )


def test_gradient():
    x = torch.randn(3, 4, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, x)
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


def test_only_the_input_is_saved():
    saved = []
    x = torch.randn(4, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        swiglu(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


def test_odd_size_is_refused():
    with pytest.raises(ValueError, match="two halves, got size 5"):
        swiglu(torch.randn(2, 5))
