"""The scores of a router on tensor cores: close to float64, and the same bits again."""

import pytest
import torch

from mindspeed import device
from mindspeed.ops.router_linear import reference, router_linear

pytestmark = pytest.mark.gpu
SHAPES = [(16384, 128, 2048), (4096, 64, 2048), (1000, 8, 4096), (33, 160, 1000), (1, 7, 65)]


def run(function, x, weight, grad):
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    scores = function(x, weight)
    scores.backward(grad.to(scores.dtype))
    return scores.detach(), x.grad, weight.grad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_close_to_float64_and_repeats_its_bits(shape):
    torch.manual_seed(0)
    tokens, experts, hidden = shape
    here = device.current().torch_device
    x = torch.randn(tokens, hidden, device=here).bfloat16()
    weight = (torch.randn(experts, hidden, device=here) / 50).bfloat16()
    grad = torch.randn(tokens, experts, device=here)
    found = run(router_linear, x, weight, grad)
    for one, two in zip(found, run(router_linear, x, weight, grad), strict=True):
        assert torch.equal(one, two)
    exact = run(reference.router_linear, x.double(), weight.double(), grad.double())
    plain = run(reference.router_linear, x, weight, grad)
    for one, of_float32, expected in zip(found, plain, exact, strict=True):
        error, allowed = ((t.double() - expected).norm() for t in (one, of_float32))
        # Tensor cores align summands and cut their last bits: 2e-6 were seen.
        assert error <= 1.05 * allowed + 4e-6 * expected.norm()
