import pytest
import torch

from mindspeed.ops.rms_norm import rms_norm

EPS = 1e-5


def reference(x, weight):
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("shape", [(6,), (3, 42), (2, 5, 123)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_matches_float64(shape, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=dtype) * 3, torch.randn(shape[-1:], dtype=dtype)
    y = rms_norm(x, weight, EPS)
    assert y.dtype == dtype
    rtol = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), reference(x, weight), rtol=rtol, atol=1e-12)


def test_matches_torch():
    x, weight = torch.randn(4, 5, 32), torch.randn(32)
    torch.testing.assert_close(rms_norm(x, weight, EPS), torch.rms_norm(x, [32], weight, EPS))


def test_float32_weight_with_bfloat16_input():
    x, weight = torch.randn(4, 32).bfloat16(), torch.randn(32)
    y = rms_norm(x, weight, EPS)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), reference(x, weight), rtol=2**-8, atol=1e-6)


def test_gradient():
    x = torch.randn(3, 4, 10, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rms_norm, (x, weight, EPS))
    assert torch.autograd.gradcheck(rms_norm, (x[0, 0].detach().requires_grad_(), weight, EPS))


def test_weight_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"weight of shape \(8,\).*got \(4,\)"):
        rms_norm(torch.randn(2, 8), torch.randn(4))
