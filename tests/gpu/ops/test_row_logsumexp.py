"""The logarithm of the sum of exponentials of rows on the GPU: error, equal bits, launches."""

import pytest
import torch

from mindspeed import device
from mindspeed.ops.row_logsumexp import row_logsumexp

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(16384, 128), (4096, 64), (33, 7), (1000, 3000)], ids=str)
def test_close_to_float64_in_one_launch_each_way(shape):
    torch.manual_seed(0)
    here = device.current().torch_device
    x, grad = torch.randn(*shape, device=here) * 5, torch.randn(shape[0], device=here)
    mine, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    out = row_logsumexp(mine)  # compiles
    torch.autograd.grad(out, mine, grad)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        out = row_logsumexp(mine)
        (found,) = torch.autograd.grad(out, mine, grad)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if "CUDA" in str(event.device_type)]
    assert len(kernels) == 2, [event.name for event in kernels]
    expected = torch.logsumexp(exact, 1)
    (wanted,) = torch.autograd.grad(expected, exact, grad.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    again = row_logsumexp(mine)
    assert torch.equal(again, out) and torch.equal(torch.autograd.grad(again, mine, grad)[0], found)
