"""SwiGLU inside the products around it, by the package itself."""

import pytest
import torch
from torch.nn.functional import silu

from mindspeed.device import hopper
from mindspeed.ops.swiglu import paired

pytestmark = pytest.mark.gpu
TOKENS, HIDDEN, COLUMNS = 1152, 520, 776  # no multiple of a kernel's tile


@pytest.fixture(autouse=True)
def _installed(_cuda):
    if not hopper.QUACK.is_here():
        pytest.skip("needs a Hopper GPU and the package quack-kernels")


def draw(dtype):
    torch.manual_seed(0)
    sizes = (TOKENS, HIDDEN), (2 * COLUMNS, HIDDEN), (HIDDEN, COLUMNS), (TOKENS, HIDDEN)
    return [torch.randn(size, device="cuda", dtype=dtype) / 16 for size in sizes]


def packed(pairs):
    return pairs.transpose(-1, -2).flatten(-2)


def ours(x, first, second, grad):
    pairs, y = paired.product(x, first)
    grad_pairs, again = paired.gradient(grad, second, pairs)
    total = torch.full_like(first, 0.5, dtype=torch.float32)
    paired.add_weight_gradient(total, grad_pairs, x)
    weight, inputs = paired.weight_gradient(grad_pairs, x), paired.input_gradient(grad_pairs, first)
    return packed(pairs), y, packed(grad_pairs), again, inputs, weight, total - 0.5


def plain(x, first, second, grad):
    products = (x @ first.t()).requires_grad_()
    gate, up = products.chunk(2, -1)
    y = silu(gate) * up
    (slope,) = torch.autograd.grad(y, products, grad @ second)
    weight = slope.t() @ x
    return products, y, slope, y, slope @ first, weight, weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_worse_than_plain_torch_against_float64(dtype):
    inputs = draw(dtype)
    assert paired.serves(*inputs[:2])
    exact = plain(*(x.double() for x in inputs))
    for got, other, want in zip(ours(*inputs), plain(*inputs), exact):
        errors = [(x.double() - want).norm() / want.norm() for x in (got, other)]
        assert errors[0] <= 1.05 * errors[1]


def test_repeats_bits():
    inputs = draw(torch.bfloat16)
    first = ours(*inputs)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first, ours(*inputs)))
