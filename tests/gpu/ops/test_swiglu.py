"""The SwiGLU kernel at real shapes against float64, next to what eager torch does."""

import gc

import pytest
import torch

from mindspeed import device
from mindspeed.ops.swiglu import swiglu

pytestmark = pytest.mark.gpu


def formula(x, weights=None):
    gate, up = x.chunk(2, dim=-1)
    y = torch.nn.functional.silu(gate) * up
    return y if weights is None else (y * weights).to(x.dtype)


def run(function, x, weights, grad):
    inputs = [t.detach().clone().requires_grad_() for t in (x, weights) if t is not None]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad.to(y.dtype))]


@pytest.mark.parametrize("with_weights", [False, True], ids=["plain", "weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4096, 2 * 8960), (1000, 2 * 777), (3, 5, 2)], ids=str)
def test_error_is_no_worse_than_eagers(shape, dtype, with_weights):
    torch.manual_seed(0)
    where = device.current().torch_device
    x = torch.randn(shape, device=where).to(dtype)
    weights = torch.rand(*shape[:-1], 1, device=where) if with_weights else None
    grad = torch.randn(*shape[:-1], shape[-1] // 2, device=where).to(dtype)

    def ours(x, weights=None):
        return swiglu(x, weights=weights)

    wide = None if weights is None else weights.double()
    exact = run(formula, x.double(), wide, grad)
    eager, first, second = (run(f, x, weights, grad) for f in (formula, ours, ours))
    for truth, plain, got, again in zip(exact, eager, first, second):
        assert torch.equal(got, again)
        assert got.dtype == plain.dtype
        error, allowed = ((t.double() - truth).norm() / truth.norm() for t in (got, plain))
        assert error <= allowed * 1.05 + 1e-7


def test_peak_memory():
    current = device.current()
    x = torch.randn(4096, 2 * 4096, device=current.torch_device, dtype=torch.bfloat16)
    x.requires_grad_()
    gc.collect()  # what other tests left behind may go now, not in between
    before = current.memory_allocated()
    y = swiglu(x)
    assert current.memory_allocated() - before == x.nbytes // 2
    grad = torch.ones_like(y)
    current.reset_peak_memory()
    y.backward(grad)
    # x.grad on top of x, y and grad: nothing else was ever allocated.
    assert current.max_memory_allocated() - before == 2 * x.nbytes
