"""SwiGLU inside the products around it, with the package's kernels stood in for by plain torch."""

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.utils.flop_counter
from torch.nn.functional import linear as plain_linear
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.ops.swiglu import paired
from mindspeed.ops.swiglu.megatron import wrap_bias_swiglu_impl, wrap_mlp_forward
from mindspeed.ops.swiglu.origin import Ahead, remember_ahead, take_ahead
from mindspeed.parallel.tensor import DeferredGradients, gated_linear, linear
from tests.unit.ops import quack_stand_in

swiglu_of_megatron = wrap_bias_swiglu_impl(lambda *_: pytest.fail("Megatron's own was called"))


@pytest.fixture
def quack(monkeypatch):
    quack_stand_in.install(monkeypatch)
    paired._is_proven.cache_clear()
    yield
    paired._is_proven.cache_clear()


def draw(hidden=16, columns=8, dtype=torch.float64):
    torch.manual_seed(5)
    sizes = (3, 2, hidden), (2 * columns, hidden), (hidden, columns)
    return [torch.randn(size, dtype=dtype).requires_grad_() for size in sizes]


def ours(x, first, second, **options):
    pairs = gated_linear(x, first, **options)
    return linear(swiglu_of_megatron(pairs, None), second, **options)


def plain(x, first, second):
    gate, up = plain_linear(x, first).chunk(2, -1)
    return plain_linear(silu(gate) * up, second)


@pytest.mark.parametrize("hidden", [16, 12])  # 12: the gradient comes by a way of its own
def test_values_and_gradients_are_those_of_plain_torch(quack, hidden):
    got, want = draw(hidden), draw(hidden)
    grad = torch.randn(3, 2, hidden, dtype=torch.float64)
    results = []
    for mlp, given in ((ours, got), (plain, want)):
        out = mlp(*given)
        results.append([out, *torch.autograd.grad(out, given, grad)])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_gradcheck(quack):
    assert torch.autograd.gradcheck(ours, draw())


def test_whoever_asks_for_swiglu_alone_gets_its_gradient(quack):
    (x, first, second), want = draw(), draw()
    pairs = gated_linear(x, first)
    out = (swiglu_of_megatron(pairs, None) * 2) @ second.t()
    grads = torch.autograd.grad(out.square().sum(), [x, first])
    expected = torch.autograd.grad((2 * plain(*want)).square().sum(), want[:2])
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_where_weight_gradients_go(quack, is_fused, is_deferred):
    x, *weights = draw()
    deferred = DeferredGradients() if is_deferred else None
    start = torch.randn(16, 16, dtype=torch.float64)
    if is_fused:
        for weight in weights:
            weight.main_grad = start[: weight.shape[0], : weight.shape[1]].clone()
    ours(x, *weights, fused=is_fused, deferred=deferred).square().sum().backward()
    if deferred is not None:
        assert all(weight.grad is None for weight in weights)
        deferred.run(2)
    want = draw()
    plain(*want).square().sum().backward()
    for weight, expected in zip(weights, want[1:]):
        found = weight.grad
        if is_fused:
            found = weight.main_grad - start[: weight.shape[0], : weight.shape[1]]
        torch.testing.assert_close(found, expected.grad, rtol=1e-12, atol=1e-12)


def moved(x):
    """Return x at an address that is no multiple of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.detach().flatten()])[1:].view(x.shape)


def test_tensors_may_lie_anywhere(quack):
    x, *weights = (moved(tensor).requires_grad_() for tensor in draw())
    for weight in weights:
        weight.main_grad = moved(torch.full_like(weight, 0.5))
    ours(x, *weights, fused=True).backward(moved(torch.ones(3, 2, 16, dtype=torch.float64)))
    want = draw()
    plain(*want).sum().backward()
    found = [x.grad, *(weight.main_grad - 0.5 for weight in weights)]
    torch.testing.assert_close(found, [each.grad for each in want], rtol=1e-12, atol=1e-12)


def test_inference_mode(quack):
    given = draw()
    with torch.inference_mode():
        torch.testing.assert_close(ours(*given), plain(*given), rtol=1e-12, atol=1e-12)


def test_a_compiler_takes_what_was_not_computed_ahead():
    x, first, second = draw()

    def mlp(x):
        return linear(swiglu_of_megatron(linear(x, first), None), second)

    torch.testing.assert_close(torch.compile(mlp, backend="eager")(x), plain(x, first, second))


class First(torch.nn.Linear):
    """A product that can be asked for SwiGLU by what no compiler enters."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self._ahead = Ahead()

    def swiglu_ahead(self):
        return self._ahead


class Mlp(torch.nn.Module):
    """As Megatron's, as far as its wrapper looks at it."""

    config = SimpleNamespace(
        cpu_offloading=False,
        gated_linear_unit=True,
        activation_func=silu,
        bias_activation_fusion=True,
        add_bias_linear=False,
        activation_func_fp8_input_store=False,
    )

    def __init__(self):
        super().__init__()
        options = {"bias": False, "dtype": torch.float64}
        self.linear_fc1 = First(16, 16, **options)
        self.linear_fc2 = torch.nn.Linear(8, 16, **options)

    @wrap_mlp_forward
    def forward(self, x, per_token_scale=None):
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(silu(gate) * up)


def test_a_compiler_takes_a_whole_mlp():
    (x, *_), mlp = draw(), Mlp()
    compiled = torch.compile(mlp, backend="eager", fullgraph=True)
    expected = plain(x, mlp.linear_fc1.weight, mlp.linear_fc2.weight)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-12, atol=1e-12)


class Zeros(TorchDispatchMode):
    """Notes the shapes of tensors that are made of zeros."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.zeros.default:
            self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.parametrize("is_fused", [False, True])
def test_whoever_looks_on_at_backward_sees_products_of_torch(quack, is_fused):
    results = []
    for is_watched in (False, True):
        x, *weights = draw()
        for weight in weights:
            weight.main_grad = torch.zeros_like(weight)
        out = ours(x, *weights, fused=is_fused).sum()
        watch = torch.utils.flop_counter.FlopCounterMode(display=False)
        with watch if is_watched else contextlib.nullcontext():
            out.backward()
        sums = [weight.main_grad if is_fused else weight.grad for weight in weights]
        results.append([x.grad, *sums])
    whole = 4 * 6 * (16 * 16 + 16 * 8)
    other = 2 * 6 * 16 * 8 if is_fused else 0  # matmul_add_fp32 tells mindspeed.tune, not torch
    assert watch.get_total_flops() == whole - other
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_backward_makes_no_gradient_for_the_output(quack):
    out = ours(*draw()).sum()
    with Zeros() as zeros:
        out.backward()
    assert (3, 2, 8) not in zeros.shapes


def test_backward_keeps_the_input_the_pairs_and_no_output(quack):
    x, first, second = draw()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        pairs = gated_linear(x, first)
        y = swiglu_of_megatron(pairs, None)
        linear(y, second)
    shapes = {tuple(tensor.shape) for tensor in kept}
    assert shapes == {tuple(x.shape), tuple(first.shape), (3, 2, 8, 2), tuple(second.shape)}
    assert not vars(pairs)  # a note would keep the output as long as the pairs


def test_a_changed_input_is_not_taken_for_the_old_one():
    x, y = torch.randn(4, 2), torch.randn(4)
    assert take_ahead(remember_ahead(x, y)) is y and take_ahead(x) is None
    remember_ahead(x, y)
    x.add_(1)
    assert take_ahead(x) is None


def test_where_it_serves(quack):
    x, weight = (torch.empty(rows, 64, dtype=torch.bfloat16) for rows in (1024, 32))
    assert paired.serves(x, weight) and paired.serves(x.half(), weight)
    assert not paired.serves(x.float(), weight)
    assert not paired.serves(x[:1023], weight)
    assert not paired.serves(x, weight[:24]) and not paired.serves(x[:, :60], weight[:, :60])
    assert not paired.serves(x.to("meta"), weight)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert not paired.serves(x, weight)


def test_kernels_that_fail_are_left_alone(quack, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise TypeError("no fail-closed semantic key\nfor this source")

    monkeypatch.setattr(sys.modules["quack.gemm_interface"], "gemm_dgated", fail)
    x, weight = (torch.empty(rows, 64, dtype=torch.bfloat16) for rows in (1024, 32))
    assert not paired.serves(x, weight) and not paired.serves(x, weight)
    (line,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert line == (
        "quack-kernels is not used for SwiGLU inside GEMMs (torch.bfloat16): "
        "no fail-closed semantic key"
    )


def test_without_the_package_it_does_not_serve():
    x, weight = (torch.empty(rows, 64, dtype=torch.bfloat16) for rows in (1024, 32))
    assert not paired.serves(x, weight)
