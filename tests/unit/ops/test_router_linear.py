"""The scores of a router: as exact as float32, in a router of Megatron and out of it."""

import pytest
import torch

from mindspeed.ops import fp32_gemm
from mindspeed.ops.router_linear import router_linear, tensor_cores
from mindspeed.ops.router_linear.megatron import wrap_gating

IMPLS = pytest.mark.parametrize(
    "run", [router_linear, tensor_cores.router_linear], ids=["reference", "tensor_cores"]
)


def draw(*shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def run_all(run, x, weight, grad):
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    scores = run(x, weight)
    scores.backward(grad.to(scores.dtype))
    return scores.detach(), x.grad, weight.grad


@IMPLS
@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (0,)], ids=str)
def test_scores_and_gradients_are_those_of_float64_rounded_once(run, shape):
    x, weight = draw(*shape, 40), draw(6, 40)
    grad = draw(*shape, 6, dtype=torch.float32)
    # Two experts whose gradients nearly cancel: rounded to 16 bits, nothing of the rest is left.
    weight[1], grad[..., 1] = weight[0], -grad[..., 0] * (1 + 1e-4)
    grad[..., 2:] = 0
    scores, *grads = run_all(run, x, weight, grad)
    exact, *exact_grads = run_all(router_linear, x.double(), weight.double(), grad)
    assert scores.dtype == torch.float32 and scores.shape == (*shape, 6)
    torch.testing.assert_close(scores.double(), exact, rtol=1e-6, atol=1e-5)
    for found, expected in zip(grads, exact_grads, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("width", [8, 5])
def test_three_parts_are_the_whole_number(width, monkeypatch):
    monkeypatch.setattr(tensor_cores, "_TILE", 128)  # several programs
    x = draw(50, width, dtype=torch.float32) * torch.logspace(-20, 20, width)
    for each in (x, x.t()):
        parts = tensor_cores.split_fp32(each)
        assert parts.dtype == torch.bfloat16 and parts.shape == (len(each), 3, each.shape[1])
        assert torch.equal(parts.double().sum(1), each.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes_are_converted(dtype):
    x, weight = draw(9, 16, dtype=dtype), draw(4, 16, dtype=dtype)
    out = tensor_cores.router_linear(x, weight)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(out, router_linear(x, weight))


def test_a_torch_without_results_in_float32_converts(monkeypatch):
    x, weight = draw(9, 16), draw(4, 16)
    assert fp32_gemm.HAS_FP32_RESULTS
    monkeypatch.setattr(fp32_gemm, "HAS_FP32_RESULTS", False)
    monkeypatch.setattr(tensor_cores, "matmul_fp32", None)
    assert torch.equal(tensor_cores.router_linear(x, weight), router_linear(x, weight))


def test_refuses_what_does_not_match():
    with pytest.raises(ValueError, match=r"of one dtype, got \(3, 4\) of torch.float32 and \(2, 5"):
        router_linear(torch.ones(3, 4), torch.ones(2, 5))
    with pytest.raises(ValueError, match="of one dtype"):
        router_linear(torch.ones(3, 4), torch.ones(2, 4).double())


def test_a_router_of_megatron_has_the_same_scores():
    from megatron.core.transformer.moe.router import Router

    class Plain(Router):
        def __init__(self, dtype, has_bias):
            torch.nn.Module.__init__(self)
            self.config = type("Config", (), {"moe_router_dtype": dtype})
            self.weight = torch.nn.Parameter(draw(6, 40))
            self.bias = torch.nn.Parameter(draw(6)) if has_bias else None

        def routing(self, logits):
            raise NotImplementedError

        def forward(self, input):
            raise NotImplementedError

    for dtype, result in (("fp32", torch.float32), (None, torch.bfloat16)):
        router, x = Plain(dtype, has_bias="bias" in Router.gating.__code__.co_names), draw(5, 3, 40)
        found, expected = wrap_gating(Router.gating)(router, x), Router.gating(router, x)
        assert found.dtype == expected.dtype == result
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
