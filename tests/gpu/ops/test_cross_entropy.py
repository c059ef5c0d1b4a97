"""The cross-entropy kernel at real shapes against float64, next to what eager torch does."""

import pytest
import torch

from mindspeed import device
from mindspeed.ops.cross_entropy import cross_entropy

pytestmark = pytest.mark.gpu


def formula(logits, target, smoothing=0.0):
    logits_acc = logits.double() if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(
        logits_acc, target, reduction="none", label_smoothing=smoothing
    )


def run(function, logits, target, grad, **options):
    logits = logits.detach().clone().requires_grad_()
    loss = function(logits, target, **options)
    return [loss.detach(), *torch.autograd.grad(loss, logits, grad.to(loss.dtype))]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(256, 151936), (100, 50257), (3, 7)], ids=str)
def test_error_is_no_worse_than_eagers(shape, dtype, smoothing):
    torch.manual_seed(0)
    where = device.current().torch_device
    logits = (torch.randn(shape, device=where) * 3).to(dtype)
    target = torch.randint(0, shape[1], shape[:1], device=where)
    target[1] = -100
    grad = torch.rand(shape[0], device=where)
    options = {"smoothing": smoothing}
    exact = run(formula, logits.double(), target, grad, **options)
    eager = run(formula, logits, target, grad, **options)
    first = run(cross_entropy, logits, target, grad, **options)
    second = run(cross_entropy, logits, target, grad, in_place=True, **options)
    for truth, plain, got, again in zip(exact, eager, first, second):
        assert torch.equal(got, again)
        error, allowed = ((t.double() - truth).norm() / truth.norm() for t in (got, plain))
        assert error <= allowed * 1.05 + 2e-7


def test_peak_memory():
    current = device.current()
    leaf = torch.randn(512, 151936, device=current.torch_device, dtype=torch.bfloat16)
    logits = leaf.requires_grad_() * 1.0
    target = torch.randint(0, 151936, (512,), device=current.torch_device)
    before = current.memory_allocated()
    current.reset_peak_memory()
    loss = cross_entropy(logits, target, in_place=True).sum()
    loss.backward()
    # The gradient of the leaf is the one new tensor of that size; the rest is numbers a token.
    assert current.max_memory_allocated() - before < logits.nbytes + 64 * 1024
