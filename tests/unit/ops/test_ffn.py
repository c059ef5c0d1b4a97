import math

import pytest
import torch

from mindspeed.ops.ffn import ffn

K1, N1, N2 = 6, 8, 5
COUNTS = [2, 0, 3]
FUNCTIONS = {
    "fastgelu": lambda t: t / (1 + torch.exp(-1.702 * t)),
    "gelu": lambda t: t / 2 * (1 + torch.erf(t / math.sqrt(2))),
    "relu": lambda t: t.clamp(min=0),
    "silu": lambda t: t / (1 + torch.exp(-t)),
}
GATED = {"geglu": "gelu", "swiglu": "silu", "reglu": "relu"}


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("activation", [*FUNCTIONS, *GATED])
@pytest.mark.parametrize("biased", [True, False])
def test_one_layer(activation, biased):
    torch.manual_seed(0)
    inner = N1 // 2 if activation in GATED else N1
    x, w1, w2 = drawn(2, 3, K1), drawn(K1, N1), drawn(inner, N2)
    b1, b2 = drawn(N1), drawn(N2)
    hidden = x @ w1 + (b1 if biased else 0)
    if activation in GATED:
        hidden = FUNCTIONS[GATED[activation]](hidden[..., :inner]) * hidden[..., inner:]
    else:
        hidden = FUNCTIONS[activation](hidden)
    biases = {"bias1": b1, "bias2": b2} if biased else {}
    expected = hidden @ w2 + (b2 if biased else 0)
    torch.testing.assert_close(ffn(x, w1, w2, activation, **biases), expected)


@pytest.mark.parametrize("form", ["expert_tokens", "expert_tokens_index"])
def test_experts(form):
    torch.manual_seed(1)
    x, w1, w2 = drawn(5, K1), drawn(3, K1, N1), drawn(3, N1, N2)
    b1, b2 = drawn(3, N1), drawn(3, N2)
    groups = COUNTS if form == "expert_tokens" else [2, 2, 5]
    got = ffn(x, w1, w2, "silu", bias1=b1, bias2=b2, **{form: groups})
    for row, expert in enumerate([0, 0, 2, 2, 2]):
        hidden = FUNCTIONS["silu"](x[row] @ w1[expert] + b1[expert])
        torch.testing.assert_close(got[row], hidden @ w2[expert] + b2[expert])


def test_quantised():
    torch.manual_seed(2)
    x, w1, w2 = (
        torch.randint(-128, 128, s, dtype=torch.int8) for s in ((4, K1), (K1, N1), (N1, N2))
    )
    b1, b2 = torch.randint(-99, 99, (N1,)), torch.randint(-99, 99, (N2,))
    dq1, dq2 = torch.rand(N1) * 1e-3, torch.rand(N2) * 1e-2
    scale, offset = torch.tensor(9.0), torch.tensor(3.0)
    got = ffn(
        x,
        w1,
        w2,
        "relu",
        bias1=b1,
        bias2=b2,
        scale=scale,
        offset=offset,
        deq_scale1=dq1,
        deq_scale2=dq2,
    )
    hidden = ((x.double() @ w1.double() + b1) * dq1).clamp(min=0)
    inner = (hidden * scale + offset).round().clamp(-128, 127)
    expected = (inner @ w2.double() + b2) * dq2
    assert got.dtype == torch.float16 and inner.unique().numel() > 5
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("channels", [True, False])
def test_quantised_experts_have_scales_of_their_own(channels):
    torch.manual_seed(4)
    x, w1, w2 = (
        torch.randint(-128, 128, s, dtype=torch.int8) for s in ((5, K1), (3, K1, N1), (3, N1, N2))
    )
    b1, b2 = torch.randint(-99, 99, (3, N1)), torch.randint(-99, 99, (3, N2))
    columns_of = {"deq_scale1": N1, "deq_scale2": N2, "scale": N1, "offset": N1}
    shapes = {name: (3, columns) if channels else (3,) for name, columns in columns_of.items()}
    sizes = {"deq_scale1": 1e-3, "deq_scale2": 1e-2, "scale": 9.0, "offset": 3.0}
    given = {name: torch.rand(shapes[name]) * size for name, size in sizes.items()}
    got = ffn(x, w1, w2, "relu", expert_tokens=COUNTS, bias1=b1, bias2=b2, **given)
    for row, expert in enumerate([0, 0, 2, 2, 2]):
        one = {name: value[expert].double() for name, value in given.items()}
        hidden = x[row].double() @ w1[expert].double() + b1[expert]
        hidden = (hidden * one["deq_scale1"]).clamp(min=0) * one["scale"] + one["offset"]
        inner = hidden.round().clamp(-128, 127)
        expected = (inner @ w2[expert].double() + b2[expert]) * one["deq_scale2"]
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-3, atol=1e-3)


def test_no_rows():
    assert ffn(torch.ones(0, 2, K1), torch.ones(K1, N1), torch.ones(N1, N2), "relu").shape == (
        *(0, 2),
        N2,
    )
    weights = torch.ones(3, K1, N1), torch.ones(3, N1, N2)
    assert ffn(torch.ones(0, K1), *weights, "relu", expert_tokens=[0, 0, 0]).shape == (0, N2)


@pytest.mark.parametrize(
    "types, message",
    [
        (("int8", "float32", "float32"), "int8 for an int8 x, got torch.int8, torch.float32"),
        (("float32", "int8", "float32"), "two weights of one dtype"),
        (("float32", "int8", "int8"), "needs antiquant_scale1 and antiquant_scale2"),
    ],
)
def test_refuses_types(types, message):
    shapes = (2, K1), (K1, N1), (N1, N2)
    given = [torch.ones(s, dtype=getattr(torch, t)) for s, t in zip(shapes, types)]
    with pytest.raises(ValueError, match=message):
        ffn(*given, "relu")


def test_int8_weights_only():
    torch.manual_seed(3)
    x = drawn(4, K1)
    w1, w2 = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((K1, N1), (N1, N2)))
    s1, s2, o1 = torch.rand(N1).double() / 50, torch.rand(N2).double() / 50, torch.ones(N1).double()
    got = ffn(x, w1, w2, "gelu", antiquant_scale1=s1, antiquant_scale2=s2, antiquant_offset1=o1)
    expected = FUNCTIONS["gelu"](x @ ((w1 + o1) * s1)) @ (w2 * s2)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"activation": "tanh"}, "without experts use fastgelu"),
        (
            {"activation": "swiglu", "expert_tokens": [2]},
            "with experts use fastgelu, gelu, relu, silu$",
        ),
        ({"expert_tokens": [2], "expert_tokens_index": [2]}, "not both"),
        ({"expert_tokens": [2]}, "weights of 3 dimensions here, got 2 and 2"),
        ({"activation": "swiglu"}, "cannot chain"),
    ],
)
def test_refuses(change, message):
    options = {"activation": "silu"} | change
    with pytest.raises(ValueError, match=message):
        ffn(
            torch.ones(2, K1),
            torch.ones(K1, N1),
            torch.ones(N1, N2),
            options.pop("activation"),
            **options,
        )
