"""RMSNorm, LayerNorm and dropout + residual + norm: reference and kernels against float64."""

import pytest
import torch

from mindspeed.ops.norm import (
    add_rms_norm,
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    layer_norm,
    rms_norm,
    triton_impl,
)
from tests.unit.ops.pairwise import pairwise

EPS, SHAPE = 1e-5, (3, 5, 44)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = {
    "layer": (dropout_add_layer_norm, triton_impl.dropout_add_layer_norm),
    "rms": (dropout_add_rms_norm, triton_impl.dropout_add_rms_norm),
}
EVERY_IMPL = pytest.mark.parametrize(
    ("kind", "function"), [(kind, f) for kind, both in OPS.items() for f in both]
)


def rms_norm_exact(x, gamma):
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * gamma.double()


def add_rms_norm_exact(x, residual, gamma):
    # The sum is a result by itself: rounded to its type before it is normalised.
    total = (x.float() + residual.float()).to(residual.dtype) if x.dtype != torch.float64 else None
    exact = x.double() + residual.double()
    if total is not None:
        exact = exact + (total.double() - exact).detach()
    return rms_norm_exact(exact, gamma), exact


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


def dropout_add_exact(kind, mask, dropout, x0, residual, weight, bias, rowscale, layerscale):
    """Compute z and its norm in float64, as the formula reads."""
    z = x0
    z = z if rowscale is None else z * rowscale[..., None]
    z = z if layerscale is None else z * layerscale
    z = z * mask / (1 - dropout)
    z = z if residual is None else z + residual
    mean = z.mean(-1, keepdim=True) if kind == "layer" else 0
    normed = (z - mean) / ((z - mean).square().mean(-1, keepdim=True) + EPS).sqrt()
    out = normed * weight
    return (out if bias is None else out + bias), z


def draw(dtype, names):
    shapes = {"x0": SHAPE, "residual": SHAPE, "rowscale": SHAPE[:-1]}
    shapes |= {name: SHAPE[-1:] for name in ("weight", "bias", "layerscale")}
    return {name: torch.randn(shapes[name]).to(dtype).requires_grad_() for name in names}


def backward(outs, tensors):
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outs]
    return torch.autograd.grad(outs, tensors, grads)


@pytest.mark.parametrize("shape", [(6,), (3, 42), (2, 5, 123)])
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_rms_norm_matches_float64(shape, dtype):
    torch.manual_seed(0)
    x, gamma = torch.randn(shape, dtype=dtype) * 3, torch.randn(shape[-1:], dtype=dtype)
    y = rms_norm(x, gamma, EPS)
    assert y.dtype == dtype
    rtol = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), rms_norm_exact(x, gamma), rtol=rtol, atol=1e-12)


def test_rms_norm_matches_torch():
    x, gamma = torch.randn(4, 5, 32), torch.randn(32)
    torch.testing.assert_close(rms_norm(x, gamma, EPS), torch.rms_norm(x, [32], gamma, EPS))


def test_float32_gamma_with_bfloat16_input():
    x, gamma = torch.randn(4, 32).bfloat16(), torch.randn(32)
    # Triton's interpreter cuts where the device rounds, which doubles the largest error.
    for function, rtol in ((rms_norm, 2**-8), (triton_impl.rms_norm, 2**-7)):
        y = function(x, gamma, EPS)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.double(), rms_norm_exact(x, gamma), rtol=rtol, atol=1e-6)


def test_rms_norm_gradcheck():
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
def test_rms_norm_kernels_match_float64(shape, dtype):
    torch.manual_seed(0)
    x, gamma = torch.randn(shape).to(dtype), torch.randn(shape[-1:]).to(dtype)
    got = run(lambda *a: triton_impl.rms_norm(*a, EPS), (x, gamma))
    want = run(rms_norm_exact, (x.double(), gamma.double()))
    for ours, exact in zip(got, want):
        assert ours.dtype == dtype
        assert relative(ours, exact) < (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [add_rms_norm, triton_impl.add_rms_norm])
def test_add_rms_norm_adds_the_residual_first(function, dtype):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 9, 70).to(dtype) for _ in range(2)] + [torch.randn(70).to(dtype)]
    got = run(lambda *a: function(*a, EPS), inputs)
    want = run(add_rms_norm_exact, inputs)
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


def test_kernels_take_strided_rows_and_write_every_element(monkeypatch):
    torch.manual_seed(0)
    full, gamma = torch.randn(6, 4, 40), torch.randn(20)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    for x in (full[..., :20], full[::2, :, 20:], full.transpose(0, 1)[..., ::2]):
        got = run(lambda *a: triton_impl.rms_norm(*a, EPS), (x, gamma))
        want = run(rms_norm_exact, (x, gamma))
        for ours, exact in zip(got, want):
            assert relative(ours, exact) < 1e-6


def test_no_rows():
    x = torch.randn(0, 8, requires_grad=True)
    gamma = torch.randn(8, requires_grad=True)
    triton_impl.rms_norm(x, gamma).sum().backward()
    assert x.grad.shape == (0, 8)
    assert gamma.grad.tolist() == [0.0] * 8


def test_frozen_gamma_skips_the_partial_sums():
    x = torch.randn(3, 8, requires_grad=True)
    gamma = torch.randn(8)
    triton_impl.rms_norm(x, gamma, EPS).sum().backward()
    exact = x.detach().double().requires_grad_()
    rms_norm_exact(exact, gamma).sum().backward()
    assert relative(x.grad, exact.grad) < 1e-6


@pytest.mark.parametrize("function", [rms_norm, triton_impl.rms_norm])
def test_rms_norm_saves_x_gamma_and_one_number_per_row(function):
    saved = []
    x = torch.randn(4, 6, 64).bfloat16().requires_grad_()
    gamma = torch.randn(64).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function(x, gamma)
    assert sum(t.nbytes for t in saved) == x.nbytes + gamma.nbytes + 4 * 6 * 4


@pytest.mark.parametrize("function", [add_rms_norm, triton_impl.add_rms_norm])
def test_add_rms_norm_saves_only_the_sum(function):
    saved = {}
    x, residual = (torch.randn(4, 6, 64).bfloat16().requires_grad_() for _ in range(2))
    gamma = torch.randn(64).bfloat16().requires_grad_()
    keep = lambda t: saved.setdefault(t.data_ptr(), t)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        _, total = function(x, residual, gamma)
    assert set(saved) >= {total.data_ptr(), gamma.data_ptr()}
    assert sum(t.nbytes for t in saved.values()) == total.nbytes + gamma.nbytes + 4 * 6 * 4


def test_rms_norm_rejects_mismatched_shapes():
    with pytest.raises(ValueError, match=r"gamma of shape \(8,\).*got \(4,\)"):
        rms_norm(torch.randn(2, 8), torch.randn(4))
    with pytest.raises(ValueError, match="floating-point x, got torch.int64"):
        rms_norm(torch.ones(2, 8, dtype=torch.int64), torch.randn(8))
    with pytest.raises(ValueError, match=r"residual of shape \(2, 8\), got \(8,\)"):
        add_rms_norm(torch.randn(2, 8), torch.randn(8), torch.randn(8))


@pairwise(
    EVERY_IMPL,
    pytest.mark.parametrize("dropout", [0.0, 0.3]),
    pytest.mark.parametrize(
        "names",
        [
            ("x0", "weight"),
            ("x0", "residual", "weight", "bias"),
            ("x0", "residual", "weight", "rowscale"),
            ("x0", "weight", "bias", "layerscale"),
            ("x0", "residual", "weight", "bias", "rowscale", "layerscale"),
        ],
        ids=len,
    ),
)
def test_dropout_add_norm_values_and_gradients(kind, function, names, dropout):
    torch.manual_seed(0)
    given = draw(torch.float32, names)
    x0, residual, weight, bias = (given.get(n) for n in ("x0", "residual", "weight", "bias"))
    scales = {n: given.get(n) for n in ("rowscale", "layerscale")}
    out, z, mask = function(
        x0, residual, weight, bias, dropout, EPS, prenorm=True, return_dropout_mask=True, **scales
    )
    x64 = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
    rest = (x64.get(n) for n in ("x0", "residual", "weight", "bias", "rowscale", "layerscale"))
    want = dropout_add_exact(kind, mask.double(), dropout, *rest)
    kept = mask.double().mean().item()
    assert mask.dtype == torch.bool and abs(kept - (1 - dropout)) < 0.06
    got = [out, z, *backward([out, z], list(given.values()))]
    for ours, true in zip(got, [*want, *backward(want, list(x64.values()))], strict=True):
        assert relative(ours, true) < 2e-6


@EVERY_IMPL
def test_dropout_add_norm_outputs(kind, function):
    given = draw(torch.float32, ("x0", "weight"))
    x0, weight = given["x0"], given["weight"]
    alone = function(x0, None, weight, None, 0.0, EPS)
    pair = function(x0, None, weight, None, 0.0, EPS, prenorm=True)
    masked = function(x0, None, weight, None, 0.0, EPS, return_dropout_mask=True)
    assert torch.equal(alone, pair[0]) and torch.equal(pair[1], x0)
    assert torch.equal(alone, masked[0]) and bool(masked[1].all())


@EVERY_IMPL
def test_dropout_add_norm_dtypes(kind, function):
    x0, weight = torch.randn(SHAPE).bfloat16(), torch.randn(SHAPE[-1:]).bfloat16()
    residual = torch.randn(SHAPE)
    out, z = function(x0, residual, weight, None, 0.0, EPS, prenorm=True)
    assert (out.dtype, z.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(z, x0.float() + residual)
    out, z = function(x0, None, weight, None, 0.0, EPS, prenorm=True, residual_in_fp32=True)
    assert (out.dtype, z.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("kind", OPS)
def test_dropout_follows_the_seed_and_is_redrawn_in_backward(kind):
    function = OPS[kind][1]
    given = draw(torch.float32, ("x0", "residual", "weight", "bias"))
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        out, z, mask = function(*given.values(), 0.5, EPS, prenorm=True, return_dropout_mask=True)
        (grad,) = torch.autograd.grad(z.sum(), given["x0"])
        assert torch.equal(grad != 0, mask)
        runs.append((out, mask))
    assert torch.equal(runs[0][0], runs[1][0])
    assert not torch.equal(runs[0][1], runs[2][1])


@pytest.mark.parametrize("kind", OPS)
def test_dropout_add_norm_saves_neither_mask_nor_summands(kind):
    given = draw(torch.bfloat16, ("x0", "residual", "weight", "bias"))
    saved = {}
    keep = lambda t: saved.setdefault(t.data_ptr(), t)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out, z = OPS[kind][1](*given.values(), 0.5, EPS, prenorm=True)
    rows = SHAPE[0] * SHAPE[1]
    statistics = 4 * rows * (2 if kind == "layer" else 1)
    total = z.nbytes + given["weight"].nbytes + statistics + 8
    assert sum(t.nbytes for t in saved.values()) == total


@pytest.mark.parametrize("kind", OPS)
def test_dropout_add_norm_gradcheck(kind):
    given = draw(torch.float64, ("x0", "residual", "weight", "bias", "rowscale", "layerscale"))
    small = {name: t.detach()[..., :2, :6] if t.dim() == 3 else t for name, t in given.items()}
    small = {
        n: t if t.dim() == 3 else t.detach()[..., : 2 if n == "rowscale" else 6]
        for n, t in small.items()
    }
    small = [t.clone().requires_grad_() for t in small.values()]

    def function(x0, residual, weight, bias, rowscale, layerscale):
        torch.manual_seed(0)
        return OPS[kind][0](
            x0,
            residual,
            weight,
            bias,
            0.3,
            EPS,
            rowscale=rowscale,
            layerscale=layerscale,
            prenorm=True,
        )

    assert torch.autograd.gradcheck(function, small)


@pairwise(
    pytest.mark.parametrize("shape", [(6,), (7, 24), (2, 5, 123), (3, 1100)]),
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16]),
    pytest.mark.parametrize("has_bias", [True, False]),
)
def test_layer_norm(shape, dtype, has_bias):
    torch.manual_seed(0)
    inputs = [torch.randn(shape), torch.randn(shape[-1:])] + [torch.randn(shape[-1:])] * has_bias
    for function in (layer_norm, triton_impl.layer_norm):
        given = [x.to(dtype).requires_grad_() for x in inputs]
        out = function(*given[:2], given[2] if has_bias else None, EPS)
        x64 = [x.detach().double().requires_grad_() for x in given]
        want = torch.nn.functional.layer_norm(x64[0], shape[-1:], *x64[1:], eps=EPS)
        assert out.dtype == dtype
        got = [out, *backward([out], given)]
        for ours, true in zip(got, [want, *backward([want], x64)], strict=True):
            assert relative(ours, true) < (
                2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropout": 1.0}, "dropout_p=1.0: use a probability"),
        ({"residual": torch.ones(44)}, r"residual must have shape \(3, 5, 44\).*got \(44,\)"),
        ({"rowscale": torch.ones(3)}, r"rowscale must have shape \(3, 5\)"),
        ({"layerscale": torch.ones(3)}, r"layerscale must have shape \(44,\)"),
    ],
)
def test_dropout_add_norm_rejects_invalid_arguments(change, message):
    scales = {name: change.get(name) for name in ("rowscale", "layerscale")}
    with pytest.raises(ValueError, match=message):
        dropout_add_layer_norm(
            torch.ones(SHAPE),
            change.get("residual"),
            torch.ones(44),
            None,
            change.get("dropout", 0.1),
            EPS,
            **scales,
        )
    with pytest.raises(ValueError, match=r"weight of shape \(8,\).*got \(4,\)"):
        layer_norm(torch.ones(2, 8), torch.ones(4), None)
