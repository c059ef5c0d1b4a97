"""An appended matmul on the GPU against float64, next to what cuBLAS does."""

import pytest
import torch

from mindspeed import device
from mindspeed.ops.append_matmul import append_matmul

pytestmark = pytest.mark.gpu
SHAPES = [(32768, 48, 1536), (32768, 16, 1536), (4096, 32, 4096), (33, 7, 1000), (1000, 100, 65)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "columns"])
def test_error_is_no_worse_than_cublas(shape, dtype, is_transposed):
    torch.manual_seed(0)
    M, N, K = shape
    here = device.current().torch_device
    x = torch.randn(M, K + 8, device=here).to(dtype)[:, :K]
    a = torch.randn((K, N) if is_transposed else (N, K), device=here).to(dtype)
    a = a.t() if is_transposed else a
    joined, low = append_matmul(x, a)
    again, _ = append_matmul(x, a)
    assert torch.equal(joined, again)
    assert torch.equal(joined[:, :K], x) and torch.equal(joined[:, K:], low)
    exact = x.double() @ a.double().t()
    error, allowed = ((t.double() - exact).norm() / exact.norm() for t in (low, x @ a.t()))
    assert error <= allowed * 1.05


def test_offsets_beyond_int32():
    x = torch.ones(1_400_000, 1536, device=device.current().torch_device, dtype=torch.bfloat16)
    x[-1] = 2.0
    joined, low = append_matmul(x, torch.ones_like(x[:16]))
    assert joined.numel() > 2**31
    assert torch.equal(joined[-1, :1536], x[-1]) and bool((low[-1] == 3072.0).all())
    assert bool((joined[-2, 1536:] == 1536.0).all())
