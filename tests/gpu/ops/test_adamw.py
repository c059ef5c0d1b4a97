"""The AdamW kernel on many tensors against float64, next to torch's fused AdamW."""

import pytest
import torch

from mindspeed import device
from mindspeed.ops.adamw import adamw, reference
from mindspeed.ops.adamw.reference import AdamHyper

pytestmark = pytest.mark.gpu
SHAPES = [(1536, 1536), (1000003,), (7,), (), (0,), (5, 8960)]


def hyper(step):
    return AdamHyper(
        lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=step, ema_decay=0.9
    )


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    where = device.current().torch_device

    def draw(shape):
        return torch.randn(shape, generator=generator).to(where, dtype)

    params = [draw(shape) for shape in SHAPES]
    zeros = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    return params, zeros, [p.clone() for p in params], [[draw(s) for s in SHAPES] for _ in "123"]


def train(function, dtype=torch.float32, copy_type=torch.bfloat16):
    params, moments, averages, grads = inputs(dtype)
    copies = [torch.full_like(p, torch.nan, dtype=copy_type) for p in params]
    for step, given in enumerate(grads, 1):
        function(params, given, *moments, hyper(step), averages=averages, copies=copies)
    return params, *moments, averages, copies


def test_equals_float64():
    exact = train(reference.adamw, torch.float64)
    first, second = train(adamw), train(adamw)
    for truth, got, again in zip(exact[:4], first, second):
        for wanted, one, other in zip(truth, got, again):
            assert torch.equal(one, other)
            torch.testing.assert_close(one.double(), wanted, rtol=2e-6, atol=1e-6)
    for copy, param in zip(first[4], first[0]):
        assert torch.equal(copy, param.bfloat16())


def test_no_memory_but_the_table():
    current = device.current()
    params, moments, averages, grads = inputs()
    adamw(params, grads[0], *moments, hyper(1), averages=averages)
    before = current.memory_allocated()
    current.reset_peak_memory()
    adamw(params, grads[0], *moments, hyper(2), averages=averages)
    assert current.max_memory_allocated() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_on_the_device(dtype):
    where = device.current().torch_device
    params, moments, _, grads = inputs()
    given = [grad.to(dtype) for grad in grads[0]]
    before = [tensor.clone() for tensor in (*params, *moments[0], *moments[1])]
    adamw(params, given, *moments, hyper(1), grad_scale=torch.tensor(torch.nan, device=where))
    assert all(map(torch.equal, (*params, *moments[0], *moments[1]), before))
    exact = [[tensor.double() for tensor in some] for some in (params, *moments)]
    scale = torch.tensor(0.3, device=where)
    exact_inputs = [grad.double() for grad in given]
    reference.adamw(exact[0], exact_inputs, *exact[1:], hyper(1), grad_scale=scale)
    adamw(params, given, *moments, hyper(1), grad_scale=scale)
    for some, wanted in zip((params, *moments), exact):
        torch.testing.assert_close([t.double() for t in some], wanted, rtol=2e-6, atol=1e-6)


def test_copies_change_no_weight():
    """Another kernel is compiled with copies: its sums must be those of the one without."""
    params, moments, _, grads = inputs()
    others, other_moments, _, _ = inputs()
    copies = [torch.full_like(p, torch.nan, dtype=torch.bfloat16) for p in params]
    for step, given in enumerate(grads, 1):
        adamw(params, given, *moments, hyper(step), copies=copies)
        adamw(others, given, *other_moments, hyper(step))
    assert all(map(torch.equal, (*params, *moments[0], *moments[1]), sum(other_moments, others)))
    assert all(torch.equal(copy, param.bfloat16()) for copy, param in zip(copies, params))
