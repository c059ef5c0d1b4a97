"""The logarithm of the sum of exponentials of rows, and Megatron's z-loss by it."""

import inspect

import pytest
import torch

from mindspeed.ops.row_logsumexp import row_logsumexp, triton_impl
from mindspeed.ops.row_logsumexp.megatron import wrap_z_loss

IMPLS = pytest.mark.parametrize(
    "run", [row_logsumexp, triton_impl.row_logsumexp], ids=["reference", "triton"]
)
INFINITY = float("inf")


def draw(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return (5 * torch.randn(shape, generator=generator)).to(dtype)


@IMPLS
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (70, 128), (3, 3000), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_and_gradients_are_those_of_float64(run, shape, dtype):
    x, grad = draw(*shape, dtype=dtype), draw(shape[0])
    mine = x.clone().requires_grad_()
    exact = x.double().requires_grad_()
    out, expected = run(mine), torch.logsumexp(exact, 1)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == torch.float32 and mine.grad.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=4 * eps, atol=4e-6)


@IMPLS
def test_infinite_scores(run):
    x = torch.tensor([[-INFINITY, 1.0], [-INFINITY, -INFINITY], [INFINITY, 1.0], [1e4, -1e4]])
    assert torch.equal(run(x), torch.tensor([1.0, -INFINITY, INFINITY, 1e4]))


@IMPLS
def test_a_view(run):
    x = draw(20, 12)[::2, 3:9]
    torch.testing.assert_close(run(x), torch.logsumexp(x, 1))


def test_refuses_what_is_no_matrix():
    with pytest.raises(ValueError, match=r"needs a matrix \(T, E\) with columns, got \(3,\)"):
        row_logsumexp(torch.ones(3))


def test_the_z_loss_of_megatron():
    from megatron.core.transformer.moe.moe_utils import z_loss_func

    cases = [{}]
    if "padding_mask" in inspect.signature(z_loss_func).parameters:
        cases.append({"padding_mask": torch.arange(24) % 3 == 0})
    for options in cases:
        one, two = (draw(24, 8).requires_grad_() for _ in range(2))
        loss, expected = (
            wrap_z_loss(z_loss_func)(one, 0.3, **options),
            z_loss_func(two, 0.3, **options),
        )
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-5, atol=1e-7)
