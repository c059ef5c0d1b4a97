import pytest
import torch

from mindspeed.ops.rms_norm import add_rms_norm, rms_norm, triton_impl

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def reference(x, gamma):
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * gamma.double()


def add_reference(x, residual, gamma):
    # The sum is a result by itself: rounded to its type before it is normalised.
    total = (x.float() + residual.float()).to(residual.dtype) if x.dtype != torch.float64 else None
    exact = x.double() + residual.double()
    if total is not None:
        exact = exact + (total.double() - exact).detach()
    return reference(exact, gamma), exact


def run(function, inputs, seed=1):
    """Return outputs and gradients for the same incoming gradients."""
    given = [x.detach().clone().requires_grad_() for x in inputs]
    outs = function(*given)
    outs = outs if isinstance(outs, tuple) else (outs,)
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outs]
    torch.autograd.backward(outs, grads)
    return [*(out.detach() for out in outs), *(x.grad for x in given)]


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("shape", [(6,), (3, 42), (2, 5, 123)])
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_matches_float64(shape, dtype):
    torch.manual_seed(0)
    x, gamma = torch.randn(shape, dtype=dtype) * 3, torch.randn(shape[-1:], dtype=dtype)
    y = rms_norm(x, gamma, EPS)
    assert y.dtype == dtype
    rtol = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), reference(x, gamma), rtol=rtol, atol=1e-12)


def test_matches_torch():
    x, gamma = torch.randn(4, 5, 32), torch.randn(32)
    torch.testing.assert_close(rms_norm(x, gamma, EPS), torch.rms_norm(x, [32], gamma, EPS))


def test_float32_gamma_with_bfloat16_input():
    x, gamma = torch.randn(4, 32).bfloat16(), torch.randn(32)
    # Triton's interpreter cuts where the device rounds, which doubles the largest error.
    for function, rtol in ((rms_norm, 2**-8), (triton_impl.rms_norm, 2**-7)):
        y = function(x, gamma, EPS)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.double(), reference(x, gamma), rtol=rtol, atol=1e-6)


def test_gradient():
    x = torch.randn(3, 4, 10, dtype=torch.float64, requires_grad=True)
    gamma = torch.randn(10, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(3, 4, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rms_norm, (x, gamma, EPS))
    assert torch.autograd.gradcheck(rms_norm, (x[0, 0].detach().requires_grad_(), gamma, EPS))
    assert torch.autograd.gradcheck(add_rms_norm, (x, residual, gamma, EPS))
    # The kernels leave float64 to the reference.
    assert torch.autograd.gradcheck(triton_impl.rms_norm, (x, gamma, EPS))


@pytest.mark.parametrize("shape", [(6,), (7, 24), (2, 5, 123), (300, 64), (3, 1100)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_match_float64(shape, dtype):
    torch.manual_seed(0)
    x, gamma = torch.randn(shape).to(dtype), torch.randn(shape[-1:]).to(dtype)
    got = run(lambda *a: triton_impl.rms_norm(*a, EPS), (x, gamma))
    want = run(reference, (x.double(), gamma.double()))
    for ours, exact in zip(got, want):
        assert ours.dtype == dtype
        assert relative(ours, exact) < (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [add_rms_norm, triton_impl.add_rms_norm])
def test_residual_is_added_first(function, dtype):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 9, 70).to(dtype) for _ in range(2)] + [torch.randn(70).to(dtype)]
    got = run(lambda *a: function(*a, EPS), inputs)
    want = run(add_reference, inputs)
    for ours, exact in zip(got, want):
        assert relative(ours, exact) < (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)


@pytest.mark.parametrize("function", [add_rms_norm, triton_impl.add_rms_norm])
def test_float32_residual_of_bfloat16_layers(function):
    x, residual, gamma = torch.randn(5, 33).bfloat16(), torch.randn(5, 33), torch.randn(33)
    y, total, grad_x, grad_residual, _ = run(lambda *a: function(*a, EPS), (x, residual, gamma))
    assert (y.dtype, total.dtype) == (grad_x.dtype, grad_residual.dtype)
    assert y.dtype == torch.bfloat16 and total.dtype == torch.float32
    torch.testing.assert_close(total, x.float() + residual)
    torch.testing.assert_close(grad_x, grad_residual.bfloat16())


def test_kernels_take_strided_rows_and_leave_no_number_unwritten(monkeypatch):
    torch.manual_seed(0)
    wide, gamma = torch.randn(6, 4, 40), torch.randn(20)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    for x in (wide[..., :20], wide[::2, :, 20:], wide.transpose(0, 1)[..., ::2]):
        got = run(lambda *a: triton_impl.rms_norm(*a, EPS), (x, gamma))
        want = run(reference, (x, gamma))
        for ours, exact in zip(got, want):
            assert relative(ours, exact) < 1e-6


def test_no_rows():
    x = torch.randn(0, 8, requires_grad=True)
    gamma = torch.randn(8, requires_grad=True)
    triton_impl.rms_norm(x, gamma).sum().backward()
    assert x.grad.shape == (0, 8)
    assert gamma.grad.tolist() == [0.0] * 8


def test_frozen_gamma_costs_no_sums():
    x = torch.randn(3, 8, requires_grad=True)
    gamma = torch.randn(8)
    triton_impl.rms_norm(x, gamma, EPS).sum().backward()
    exact = x.detach().double().requires_grad_()
    reference(exact, gamma).sum().backward()
    assert relative(x.grad, exact.grad) < 1e-6


@pytest.mark.parametrize("function", [rms_norm, triton_impl.rms_norm])
def test_x_gamma_and_one_number_a_row_are_saved(function):
    saved = []
    x = torch.randn(4, 6, 64).bfloat16().requires_grad_()
    gamma = torch.randn(64).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function(x, gamma)
    assert sum(t.nbytes for t in saved) == x.nbytes + gamma.nbytes + 4 * 6 * 4


@pytest.mark.parametrize("function", [add_rms_norm, triton_impl.add_rms_norm])
def test_the_sum_is_saved_and_neither_of_its_parts(function):
    saved = {}
    x, residual = (torch.randn(4, 6, 64).bfloat16().requires_grad_() for _ in range(2))
    gamma = torch.randn(64).bfloat16().requires_grad_()
    keep = lambda t: saved.setdefault(t.data_ptr(), t)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        _, total = function(x, residual, gamma)
    assert set(saved) >= {total.data_ptr(), gamma.data_ptr()}
    assert sum(t.nbytes for t in saved.values()) == total.nbytes + gamma.nbytes + 4 * 6 * 4


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"gamma of shape \(8,\).*got \(4,\)"):
        rms_norm(torch.randn(2, 8), torch.randn(4))
    with pytest.raises(ValueError, match="floating-point numbers, got torch.int64"):
        rms_norm(torch.ones(2, 8, dtype=torch.int64), torch.randn(8))
    with pytest.raises(ValueError, match=r"residual of shape \(2, 8\), got \(8,\)"):
        add_rms_norm(torch.randn(2, 8), torch.randn(8), torch.randn(8))
