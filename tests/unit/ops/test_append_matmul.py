import pytest
import torch

from mindspeed.ops.append_matmul import append_matmul, triton_impl
from tests.unit.ops.pairwise import pairwise

IMPLS = pytest.mark.parametrize(
    "run", [append_matmul, triton_impl.append_matmul], ids=["reference", "triton"]
)


def draw(*shape, dtype=torch.float16):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


@pairwise(
    IMPLS,
    pytest.mark.parametrize(
        "shape", [(1, 1, 1), (130, 40, 100), (128, 16, 64), (5, 130, 70), (0, 3, 8)], ids=str
    ),
    pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "columns"]),
)
def test_copies_and_multiplies(run, shape, dtype, is_transposed):
    if run is triton_impl.append_matmul and dtype == torch.bfloat16:
        dtype = torch.float16  # Triton's interpreter multiplies no bfloat16; tests/gpu does
    M, N, K = shape
    x = draw(M, K, dtype=dtype)
    a = draw(K, N, dtype=dtype).t() if is_transposed else draw(N, K, dtype=dtype)
    joined, low = run(x, a)
    assert joined.shape == (M, K + N) and joined.dtype == low.dtype == dtype
    assert torch.equal(joined[:, :K], x) and torch.equal(joined[:, K:], low)
    assert low.is_contiguous() and joined.is_contiguous()
    eps = torch.finfo(dtype).eps
    expected = x.double() @ a.double().t()
    torch.testing.assert_close(low.double(), expected, rtol=eps, atol=2 * K * eps)


@IMPLS
def test_strided(run):
    x, a = draw(90, 80), draw(6, 40)
    for view in (x[:, :40], x[::2, 40:], x[:80, :40].t()[:, ::2]):
        joined, low = run(view, a[:, : view.shape[1]])
        expected = view.double() @ a[:, : view.shape[1]].double().t()
        assert torch.equal(joined[:, : view.shape[1]], view)
        torch.testing.assert_close(low.double(), expected, rtol=1e-3, atol=1e-2)


def test_refuses_what_does_not_match_and_a_gradient():
    with pytest.raises(ValueError, match=r"of one dtype, got \(3, 4\) of torch.float32 and \(2, 5"):
        append_matmul(torch.ones(3, 4), torch.ones(2, 5))
    with pytest.raises(ValueError, match="has no gradient"):
        append_matmul(torch.ones(3, 3, requires_grad=True), torch.ones(2, 3))
