import pytest
import torch

from mindspeed.ops import fp32_gemm
from mindspeed.ops.matmul_add_fp32 import cuda_impl, matmul_add_fp32

IMPLS = pytest.mark.parametrize(
    "run", [matmul_add_fp32, cuda_impl.matmul_add_fp32], ids=["reference", "cublas"]
)


def exact(x, dy, grad):
    rows = torch.einsum("to,ti->oi", dy.double().flatten(0, -2), x.double().flatten(0, -2))
    return grad.double() + rows


@IMPLS
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_adds_the_float32_gemm(shape, dtype, run):
    torch.manual_seed(0)
    x, dy = torch.randn(*shape, 11).to(dtype), torch.randn(*shape, 6).to(dtype)
    grad = torch.randn(6, 11, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    expected = exact(x, dy, grad)
    assert run(x, dy, grad) is None
    torch.testing.assert_close(grad.double(), expected, rtol=1e-6, atol=1e-5)


def test_strided_factors_and_a_strided_grad():
    x, dy = torch.randn(9, 4).t(), torch.randn(6, 4).t()
    buffer = torch.randn(9, 6)
    expected = exact(x, dy, buffer.t())
    matmul_add_fp32(x, dy, buffer.t())
    torch.testing.assert_close(buffer.t().double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 3])
def test_empty_inputs_change_nothing(rows):
    grad = torch.ones(5, 4 if rows == 0 else 0)
    matmul_add_fp32(torch.randn(rows, grad.shape[1]), torch.randn(rows, 5), grad)
    assert torch.equal(grad, torch.ones_like(grad))


@IMPLS
def test_the_product_is_not_rounded(run):
    x, dy = torch.randn(64, 8).bfloat16(), torch.randn(64, 8).bfloat16()
    grad = torch.zeros(8, 8)
    run(x, dy, grad)
    expected = exact(x, dy, torch.zeros(8, 8))
    assert (expected.bfloat16().double() - expected).abs().max() > 1e-3  # the test could tell
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-5)


class OnGpu(torch.Tensor):
    """A tensor of the cpu that says otherwise: torch's GEMM with float32 results refuses it."""

    is_cuda = True


def test_a_torch_without_results_in_float32_converts(monkeypatch):
    x, dy = (torch.randn(7, size).bfloat16().as_subclass(OnGpu) for size in (4, 5))
    grad = torch.ones(5, 4)
    with pytest.raises(NotImplementedError, match="aten::mm.dtype"):
        cuda_impl.matmul_add_fp32(x, dy, grad)
    monkeypatch.setattr(fp32_gemm, "HAS_FP32_RESULTS", False)
    cuda_impl.matmul_add_fp32(x, dy, grad)
    plain = (each.as_subclass(torch.Tensor) for each in (x, dy))
    expected = exact(*plain, torch.ones(5, 4))
    torch.testing.assert_close(grad.double(), expected, rtol=1e-6, atol=1e-5)


def test_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"got grad_output \(3, 5\), total_input \(4, 6\)"):
        matmul_add_fp32(torch.ones(4, 6), torch.ones(3, 5), torch.ones(5, 6))
    with pytest.raises(ValueError, match="needs a grad of torch.float32"):
        matmul_add_fp32(torch.ones(4, 6), torch.ones(4, 5), torch.ones(5, 6).bfloat16())
