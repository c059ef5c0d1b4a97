import pytest
import torch

from mindspeed.ops.column_sum import column_sum, triton_impl
from tests.unit.ops.pairwise import pairwise

IMPLS = pytest.mark.parametrize(
    "run", [column_sum, triton_impl.column_sum], ids=["reference", "triton"]
)


@pairwise(
    IMPLS,
    pytest.mark.parametrize("shape", [(1, 1), (7, 300), (130, 5), (1100, 16), (0, 3)], ids=str),
    pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    pytest.mark.parametrize("result", [None, torch.float32]),
)
def test_sums_in_float32_and_rounds_once(run, shape, dtype, result):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    got = run(x, result)
    assert got.dtype == (result or dtype) and got.shape == shape[1:]
    exact = torch.einsum("mn->n", x.double())
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=max(eps, 1e-6), atol=1e-4)


@IMPLS
def test_strided(run):
    x = torch.randn(40, 90)
    for view in (x.t(), x[::3], x[:, 1::2]):
        torch.testing.assert_close(run(view), view.sum(0), rtol=1e-5, atol=1e-5)


def test_refuses_what_is_no_matrix_and_a_gradient():
    with pytest.raises(ValueError, match=r"matrix of floats, got \(3,\)"):
        column_sum(torch.ones(3))
    with pytest.raises(ValueError, match="has no gradient"):
        column_sum(torch.ones(3, 3, requires_grad=True))
