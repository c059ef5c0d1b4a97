"""SwiGLU inside the GEMMs around it, by the package itself."""

import pytest
import torch
from torch.nn.functional import silu

from mindspeed.device import hopper
from mindspeed.ops.swiglu import gemm_swiglu
from mindspeed.parallel.tensor import (
    BufferedWeight,
    FrozenWeight,
    linear_swiglu,
    low_rank_linear_swiglu,
    low_rank_swiglu_linear,
    swiglu_linear,
)

pytestmark = pytest.mark.gpu
TOKENS, HIDDEN, COLUMNS = 1152, 520, 776  # no multiple of a kernel's tile


@pytest.fixture(autouse=True)
def _installed(_cuda):
    if not hopper.QUACK.is_here():
        pytest.skip("needs a Hopper GPU and the package quack-kernels")


def draw(dtype):
    torch.manual_seed(0)
    sizes = (TOKENS, HIDDEN), (2 * COLUMNS, HIDDEN), (HIDDEN, COLUMNS), (TOKENS, HIDDEN)
    x, first, second, grad = (torch.randn(size, device="cuda", dtype=dtype) for size in sizes)
    return x, first / 16, second / 16, grad


def packed(preact):
    return preact.transpose(-1, -2).flatten(-2)


def ours(x, first, second, grad):
    preact, y = gemm_swiglu.gemm_swiglu(x, first)
    slope, again = gemm_swiglu.gemm_swiglu_gradient(grad, second, preact)
    total = torch.full_like(first, 0.5, dtype=torch.float32)
    gemm_swiglu.add_weight_gradient(total, slope, x)
    weight = gemm_swiglu.weight_gradient(slope, x)
    inputs = gemm_swiglu.input_gradient(slope, first)
    return packed(preact), y, packed(slope), again, inputs, weight, total - 0.5


def plain(x, first, second, grad):
    preact = (x @ first.t()).requires_grad_()
    gate, up = preact.chunk(2, -1)
    y = silu(gate) * up
    (slope,) = torch.autograd.grad(y, preact, grad @ second)
    weight = slope.t() @ x
    return preact, y, slope, y, slope @ first, weight, weight


def is_no_worse(got, other, exact):
    errors = [(x.double() - exact).norm() / exact.norm() for x in (got, other)]
    return errors[0] <= 1.05 * errors[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_worse_than_plain_torch_against_float64(dtype):
    inputs = draw(dtype)
    assert gemm_swiglu.is_supported(*inputs[:2])
    exact = plain(*(x.double() for x in inputs))
    for results in zip(ours(*inputs), plain(*inputs), exact):
        assert is_no_worse(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_gradients_no_preactivation_is_written(dtype):
    """The activation has the bits of the kernel of training."""
    x, first, _, _ = draw(dtype)
    assert gemm_swiglu.is_supported(x, first)
    _, expected = linear_swiglu(x, first)
    with torch.no_grad():
        assert not gemm_swiglu.needs_preact(dtype)
        linear_swiglu(x, first)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        preact, y = linear_swiglu(x, first)
    taken = torch.cuda.max_memory_allocated() - before
    assert preact is None and torch.equal(y, expected)
    assert y.nbytes <= taken < 2 * y.nbytes  # the pre-activation is as large as two


def test_repeats_bits():
    inputs = draw(torch.bfloat16)
    first = ours(*inputs)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first, ours(*inputs)))


def test_a_weight_in_a_wider_buffer_gives_the_same_bits():
    x, first, second, grad = draw(torch.bfloat16)
    wide = torch.randn(2 * COLUMNS, HIDDEN + 32, device="cuda", dtype=torch.bfloat16)
    wide[:, :HIDDEN] = first
    found = ours(x, wide[:, :HIDDEN], second, grad)
    assert all(map(torch.equal, found, ours(x, first, second, grad)))


def mlp(x, first, second):
    preact, y = linear_swiglu(x.view(-1, 2, HIDDEN), first, fused=True)
    return swiglu_linear(preact, y, second, fused=True)


def gradients(x, first, second, grad):
    _, y, *_, of_x, of_first, _ = plain(x, first, second, grad)
    return of_x, of_first, grad.t() @ y


@pytest.mark.parametrize("offset", [0, 1])  # 1: an address that the copy engine does not take
def test_an_mlp_keeps_no_activation_and_adds_to_main_grad(offset):
    tensors = draw(torch.bfloat16)
    *given, grad = tensors
    x, *weights = (each.detach().requires_grad_() for each in given)
    for weight in weights:
        buffer = torch.zeros(weight.numel() + offset, device="cuda")
        weight.main_grad = buffer[offset:].view(weight.shape)
    mlp(x, *weights)  # makes cuBLAS take its workspace
    before = torch.cuda.memory_allocated()
    out = mlp(x, *weights)
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    assert (
        2 * kept < 5 * TOKENS * COLUMNS * out.itemsize
    )  # the pre-activation is 2, the activation would be 1
    out.backward(grad.view(out.shape))
    found = x.grad, *(weight.main_grad for weight in weights)
    exact = gradients(*(each.double() for each in tensors))
    for results in zip(found, gradients(*tensors), exact):
        assert is_no_worse(*results)


RANK = 16


def low_rank(x, first, second, grad, factors, frozen):
    """Return the output of an MLP with adapters, and all its gradients; `frozen` fuses them."""
    x, *factors = (one.detach().clone().requires_grad_() for one in (x, *factors))
    if frozen is not None:
        assert gemm_swiglu.is_supported(x, first, RANK)
        preact, y = low_rank_linear_swiglu(x, frozen(first.clone()), *factors[:2])
        out = low_rank_swiglu_linear(preact, y, frozen(second.clone()), *factors[2:])
    else:
        inner, outer, inner_second, outer_second = factors
        gate, up = (x @ first.t() + x @ inner.t() @ outer.t()).chunk(2, -1)
        activated = silu(gate) * up
        out = activated @ second.t() + activated @ inner_second.t() @ outer_second.t()
    return out, *torch.autograd.grad(out, (x, *factors), grad)


@pytest.mark.parametrize(
    "frozen", [FrozenWeight, lambda weight: BufferedWeight(weight, RANK)], ids=["plain", "buffered"]
)
def test_adapters_inside_the_gemms_are_no_worse_than_beside_them(frozen):
    inputs = draw(torch.bfloat16)
    sizes = (RANK, HIDDEN), (2 * COLUMNS, RANK), (RANK, COLUMNS), (HIDDEN, RANK)
    factors = [torch.randn(size, device="cuda", dtype=torch.bfloat16) / 8 for size in sizes]
    got, other = (low_rank(*inputs, factors, which) for which in (frozen, None))
    exact = low_rank(*(x.double() for x in inputs), [x.double() for x in factors], None)
    for one, plain_one, exact_one in zip(got, other, exact, strict=True):
        assert is_no_worse(one, plain_one, exact_one)
