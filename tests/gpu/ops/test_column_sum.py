"""Sums of columns on the GPU against float64, next to what torch does."""

import pytest
import torch

from mindspeed import device
from mindspeed.ops.column_sum import column_sum

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(8192, 2048), (8192, 17920), (33, 1000), (100000, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_no_worse_than_torchs(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, device=device.current().torch_device).to(dtype)
    exact = x.double().sum(0)
    first, second = column_sum(x), column_sum(x)
    assert torch.equal(first, second) and first.dtype == dtype
    error, allowed = ((t.double() - exact).norm() / exact.norm() for t in (first, x.sum(0)))
    assert error <= allowed * 1.05 + 1e-6
