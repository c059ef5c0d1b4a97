import pytest
import torch

from mindspeed.ops.dropout_add_norm import (
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    triton_impl,
)
from mindspeed.ops.layer_norm import layer_norm
from mindspeed.ops.layer_norm import triton_impl as layer_norm_kernel

EPS, SHAPE = 1e-5, (3, 5, 44)
OPS = {
    "layer": (dropout_add_layer_norm, triton_impl.dropout_add_layer_norm),
    "rms": (dropout_add_rms_norm, triton_impl.dropout_add_rms_norm),
}
EVERY = pytest.mark.parametrize(
    ("kind", "function"), [(kind, f) for kind, both in OPS.items() for f in both]
)


def exact(kind, mask, dropout, x0, residual, weight, bias, rowscale, layerscale):
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


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@EVERY
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "names",
    [
        ("x0", "weight"),
        ("x0", "residual", "weight", "bias"),
        ("x0", "residual", "weight", "rowscale"),
        ("x0", "weight", "bias", "layerscale"),
        ("x0", "residual", "weight", "bias", "rowscale", "layerscale"),
    ],
    ids=len,
)
def test_values_and_gradients_of_every_input(kind, function, names, dropout):
    torch.manual_seed(0)
    given = draw(torch.float32, names)
    x0, residual, weight, bias = (given.get(n) for n in ("x0", "residual", "weight", "bias"))
    scales = {n: given.get(n) for n in ("rowscale", "layerscale")}
    out, z, mask = function(
        x0, residual, weight, bias, dropout, EPS, prenorm=True, return_dropout_mask=True, **scales
    )
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
    rest = (wide.get(n) for n in ("x0", "residual", "weight", "bias", "rowscale", "layerscale"))
    want = exact(kind, mask.double(), dropout, *rest)
    kept = mask.double().mean().item()
    assert mask.dtype == torch.bool and abs(kept - (1 - dropout)) < 0.06
    got = [out, z, *backward([out, z], list(given.values()))]
    for ours, true in zip(got, [*want, *backward(want, list(wide.values()))], strict=True):
        assert relative(ours, true) < 2e-6


@EVERY
def test_what_is_returned(kind, function):
    given = draw(torch.float32, ("x0", "weight"))
    x0, weight = given["x0"], given["weight"]
    alone = function(x0, None, weight, None, 0.0, EPS)
    pair = function(x0, None, weight, None, 0.0, EPS, prenorm=True)
    masked = function(x0, None, weight, None, 0.0, EPS, return_dropout_mask=True)
    assert torch.equal(alone, pair[0]) and torch.equal(pair[1], x0)
    assert torch.equal(alone, masked[0]) and bool(masked[1].all())


@EVERY
def test_types(kind, function):
    x0, weight = torch.randn(SHAPE).bfloat16(), torch.randn(SHAPE[-1:]).bfloat16()
    residual = torch.randn(SHAPE)
    out, z = function(x0, residual, weight, None, 0.0, EPS, prenorm=True)
    assert (out.dtype, z.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(z, x0.float() + residual)
    out, z = function(x0, None, weight, None, 0.0, EPS, prenorm=True, residual_in_fp32=True)
    assert (out.dtype, z.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("kind", OPS)
def test_the_dropout_follows_the_seed_and_is_drawn_again_in_backward(kind):
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
def test_neither_the_mask_nor_the_parts_of_the_sum_are_kept(kind):
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
def test_gradcheck(kind):
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


@pytest.mark.parametrize("shape", [(6,), (7, 24), (2, 5, 123), (3, 1100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm(shape, dtype, has_bias):
    torch.manual_seed(0)
    inputs = [torch.randn(shape), torch.randn(shape[-1:])] + [torch.randn(shape[-1:])] * has_bias
    for function in (layer_norm, layer_norm_kernel.layer_norm):
        given = [x.to(dtype).requires_grad_() for x in inputs]
        out = function(*given[:2], given[2] if has_bias else None, EPS)
        wide = [x.detach().double().requires_grad_() for x in given]
        want = torch.nn.functional.layer_norm(wide[0], shape[-1:], *wide[1:], eps=EPS)
        assert out.dtype == dtype
        got = [out, *backward([out], given)]
        for ours, true in zip(got, [want, *backward([want], wide)], strict=True):
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
def test_what_does_not_fit_is_refused(change, message):
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
