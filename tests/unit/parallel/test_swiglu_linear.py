"""The linears around SwiGLU keep its input alone, and compute what plain torch does.

The kernels of quack-kernels are stood in for by plain torch.
"""

import contextlib

import pytest
import torch
import torch.utils.flop_counter
from torch.nn.functional import linear as plain_linear
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.ops.swiglu import gemm_swiglu, swiglu
from mindspeed.parallel.tensor import DeferredGradients, linear, linear_swiglu, swiglu_linear
from tests.unit.ops import quack_stand_in

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture
def quack(monkeypatch):
    quack_stand_in.install(monkeypatch)
    for answer in (gemm_swiglu._passes_trial, gemm_swiglu._passes_evaluation):
        answer.cache_clear()
    yield
    for answer in (gemm_swiglu._passes_trial, gemm_swiglu._passes_evaluation):
        answer.cache_clear()


def draw(hidden=16, columns=8, dtype=torch.float64):
    torch.manual_seed(5)
    sizes = (3, 2, hidden), (2 * columns, hidden), (hidden, columns)
    return [torch.randn(size, dtype=dtype).requires_grad_() for size in sizes]


def in_epilogue(x, first, second, **options):
    return swiglu_linear(*linear_swiglu(x, first, **options), second, **options)


def apart(x, first, second, **options):
    preact = linear(x, first, **options)
    return swiglu_linear(preact, swiglu(preact), second, **options)


def plain(x, first, second):
    gate, up = plain_linear(x, first).chunk(2, -1)
    return plain_linear(silu(gate) * up, second)


MLPS = pytest.mark.parametrize("mlp", [in_epilogue, apart])


@MLPS
@pytest.mark.parametrize("hidden", [16, 12])  # 12: not aligned, the gradient takes another path
def test_values_and_gradients_equal_plain_torch(quack, mlp, hidden):
    got, want = draw(hidden), draw(hidden)
    grad = torch.randn(3, 2, hidden, dtype=torch.float64)
    results = []
    for function, given in ((mlp, got), (plain, want)):
        out = function(*given)
        results.append([out, *torch.autograd.grad(out, given, grad)])
    torch.testing.assert_close(*results, **EXACT)


@MLPS
def test_gradcheck(quack, mlp):
    assert torch.autograd.gradcheck(mlp, draw())


def test_gradient_through_the_activation_alone(quack):
    (x, first, second), want = draw(), draw()
    preact, y = linear_swiglu(x, first)
    out = (gemm_swiglu.with_gradient(y, preact) * 2) @ second.t()
    grads = torch.autograd.grad(out.square().sum(), [x, first])
    expected = torch.autograd.grad((2 * plain(*want)).square().sum(), want[:2])
    torch.testing.assert_close(grads, expected, **EXACT)


@MLPS
@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_delivery_of_weight_gradients(quack, mlp, is_fused, is_deferred):
    x, *weights = draw()
    deferred = DeferredGradients() if is_deferred else None
    start = torch.randn(16, 16, dtype=torch.float64)
    if is_fused:
        for weight in weights:
            weight.main_grad = start[: weight.shape[0], : weight.shape[1]].clone()
    mlp(x, *weights, fused=is_fused, deferred=deferred).square().sum().backward()
    if deferred is not None:
        assert all(weight.grad is None for weight in weights)
        deferred.run(2)
    want = draw()
    plain(*want).square().sum().backward()
    for weight, expected in zip(weights, want[1:]):
        found = weight.grad
        if is_fused:
            found = weight.main_grad - start[: weight.shape[0], : weight.shape[1]]
        torch.testing.assert_close(found, expected.grad, **EXACT)


def moved(x):
    """Return x at an address that is no multiple of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.detach().flatten()])[1:].view(x.shape)


@MLPS
def test_unaligned_addresses(quack, mlp):
    x, *weights = (moved(tensor).requires_grad_() for tensor in draw())
    for weight in weights:
        weight.main_grad = moved(torch.full_like(weight, 0.5))
    mlp(x, *weights, fused=True).backward(moved(torch.ones(3, 2, 16, dtype=torch.float64)))
    want = draw()
    plain(*want).sum().backward()
    found = [x.grad, *(weight.main_grad - 0.5 for weight in weights)]
    torch.testing.assert_close(found, [each.grad for each in want], **EXACT)


@MLPS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_backward(quack, mlp, mode):
    given = draw()
    with mode():
        torch.testing.assert_close(mlp(*given), plain(*given), **EXACT)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_backward_there_is_no_preactivation(quack, mode):
    x, first, _ = draw()
    preact, expected = linear_swiglu(x, first)
    with mode():
        none, y = linear_swiglu(x, first)
    assert preact is not None and none is None and torch.equal(y, expected)


class Zeros(TorchDispatchMode):
    """Records the shapes of tensors that are made of zeros."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.zeros.default:
            self.shapes.append(tuple(out.shape))
        return out


def test_backward_makes_no_gradient_of_the_activation(quack):
    out = in_epilogue(*draw()).sum()
    with Zeros() as zeros:
        out.backward()
    assert (3, 2, 8) not in zeros.shapes


@pytest.mark.parametrize("is_fused", [False, True])
def test_backward_under_a_flop_counter_runs_matmuls_of_torch(quack, is_fused):
    results = []
    for is_counted in (False, True):
        x, *weights = draw()
        for weight in weights:
            weight.main_grad = torch.zeros_like(weight)
        out = in_epilogue(x, *weights, fused=is_fused).sum()
        counter = torch.utils.flop_counter.FlopCounterMode(display=False)
        with counter if is_counted else contextlib.nullcontext():
            out.backward()
        sums = [weight.main_grad if is_fused else weight.grad for weight in weights]
        results.append([x.grad, *sums])
    whole = 4 * 6 * (16 * 16 + 16 * 8)
    other = 2 * 6 * 16 * 8 if is_fused else 0  # matmul_add_fp32 reports to mindspeed.tune
    assert counter.get_total_flops() == whole - other
    torch.testing.assert_close(*results, **EXACT)


@MLPS
def test_backward_keeps_the_preactivation_and_no_activation(quack, mlp):
    x, first, second = draw()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        mlp(x, first, second)
    shapes = [tuple(tensor.shape) for tensor in kept]
    preact = (3, 2, 8, 2) if mlp is in_epilogue else (3, 2, 16)
    # SwiGLU on its own keeps the same tensor once more.
    once_more = [] if mlp is in_epilogue else [preact]
    expected = [tuple(x.shape), tuple(first.shape), *once_more, preact, tuple(second.shape)]
    assert shapes == expected
    assert len({tensor.data_ptr() for tensor in kept}) == 4
