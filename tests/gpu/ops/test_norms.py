"""The norms' kernels at real sizes: error, equal bits, memory, launches, torch.compile."""

import pytest
import torch
from torch.nn import functional

from mindspeed.ops.norm import (
    add_rms_norm,
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    layer_norm,
    rms_norm,
)
from tests.gpu.ops.forward_backward import run

pytestmark = pytest.mark.gpu
EPS = 1e-6
SHAPES = [(8192, 1536), (4096, 4096), (2048, 8192), (1000, 5120), (65536, 128), (3, 7, 123)]


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def draw(shape, dtype, count):
    torch.manual_seed(0)
    full = [torch.randn(shape, device="cuda").to(dtype) for _ in range(count)]
    return full, torch.rand(shape[-1], device="cuda").to(dtype) + 0.5


def check(ours, eager, inputs, dtype):
    got, again, plain = run(ours, inputs), run(ours, inputs), run(eager, inputs)
    for first, second in zip(got, again):
        assert torch.equal(first, second), "two runs differ"
    exact = run(eager, [x.double() for x in inputs])
    for mine, torchs, true in zip(got, plain, exact, strict=True):
        assert mine.dtype == torchs.dtype
        limit = 1e-6 if dtype == torch.float32 else 1.05 * error(torchs, true)
        assert error(mine, true) <= max(limit, torch.finfo(dtype).eps / 4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rms_norm(shape, dtype):
    (x,), gamma = draw(shape, dtype, 1)
    check(
        lambda x, g: rms_norm(x, g, EPS),
        lambda x, g: functional.rms_norm(x, g.shape, g, EPS),
        (x, gamma),
        dtype,
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_add_rms_norm(shape, dtype):
    (x, residual), gamma = draw(shape, dtype, 2)

    def eager(x, residual, gamma):
        total = x + residual
        return functional.rms_norm(total, gamma.shape, gamma, EPS), total

    check(lambda *a: add_rms_norm(*a, EPS), eager, (x, residual, gamma), dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_layer_norm(shape, dtype):
    (x,), weight = draw(shape, dtype, 1)
    check(
        lambda x, w, b: layer_norm(x, w, b, EPS),
        lambda x, w, b: functional.layer_norm(x, w.shape, w, b, EPS),
        (x, weight, weight.flip(0)),
        dtype,
    )


@pytest.mark.parametrize("function", [dropout_add_layer_norm, dropout_add_rms_norm])
def test_dropout_drops_what_its_mask_says(function):
    (x, residual), weight = draw((2048, 4096), torch.bfloat16, 2)
    x, residual = x.requires_grad_(), residual.requires_grad_()
    torch.manual_seed(5)
    out, z, mask = function(
        x, residual, weight, None, 0.1, EPS, prenorm=True, return_dropout_mask=True
    )
    assert abs(mask.float().mean().item() - 0.9) < 1e-3
    want = x.double() * mask / 0.9 + residual.double()
    assert error(z, want) < 4e-3
    (grad,) = torch.autograd.grad(z, x, torch.ones_like(z))
    assert torch.equal(grad != 0, mask)
    torch.manual_seed(5)
    again, same_z = function(x, residual, weight, None, 0.1, EPS, prenorm=True)
    assert torch.equal(z, same_z)
    # A kernel that writes a mask lies otherwise in registers, and adds up in another order.
    assert error(again, out) < 1e-3


def test_one_launch_forward_and_two_backward():
    (x,), gamma = draw((256, 1536), torch.bfloat16, 1)
    x, gamma = x.requires_grad_(), gamma.requires_grad_()
    rms_norm(x, gamma).sum().backward()
    grad = torch.randn_like(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        out = rms_norm(x, gamma)
        torch.autograd.grad(out, (x, gamma), grad)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if "CUDA" in str(event.device_type)]
    assert len(kernels) == 3, [event.name for event in kernels]


def test_peak_memory_is_what_the_formula_says():
    (x,), gamma = draw((8192, 4096), torch.bfloat16, 1)
    x, gamma = x.requires_grad_(), gamma.requires_grad_()
    grad = torch.randn_like(x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = rms_norm(x, gamma)
    kept = torch.cuda.memory_allocated() - before
    assert kept == out.nbytes + 4 * 8192
    torch.autograd.grad(out, (x, gamma), grad)
    # The gradient of x, and a partial sum of the gradient of gamma from each program.
    partial = 256 * 4096 * 4
    assert torch.cuda.max_memory_allocated() - before <= kept + x.nbytes + partial + 2**20


def test_compiles_without_a_graph_break():
    (x, residual), gamma = draw((512, 1536), torch.bfloat16, 2)
    inputs = (x, residual, gamma)
    eager = run(lambda *a: add_rms_norm(*a, EPS), inputs)
    compiled = torch.compile(lambda *a: add_rms_norm(*a, EPS), fullgraph=True)
    for got, want in zip(run(compiled, inputs), eager):
        torch.testing.assert_close(got, want)
