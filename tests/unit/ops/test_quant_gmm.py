"""Grouped GEMMs with int8 matrices, against sums written out."""

import pytest
import torch

from mindspeed.ops.quant_gmm import quant_gmm, quant_gmm_v2, triton_impl, weight_quant_gmm

COUNTS, ENDS = [3, 0, 2], [3, 3, 5]
M, K, N, E = 5, 40, 6, 3
GROUP = [0, 0, 0, 2, 2]


def case():
    torch.manual_seed(0)
    x = torch.randint(-128, 128, (M, K), dtype=torch.int8)
    weight = torch.randint(-128, 128, (E, K, N), dtype=torch.int8)
    bias = torch.randint(-1000, 1000, (E, N), dtype=torch.int32)
    return x, weight, bias


def exact_gmm(x, weight):
    rows = [
        [sum(int(a) * int(b) for a, b in zip(x[m], weight[GROUP[m]].t()[n])) for n in range(N)]
        for m in range(M)
    ]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act_type", [0, 1, 2, 4, 5])
def test_scaled_and_activated(scale_type, act_type):
    x, weight, bias = case()
    scale = (torch.rand(E, N) * 1e-4).to(scale_type)
    token_scale = torch.rand(M)
    total = (exact_gmm(x, weight) + bias[GROUP]) * scale[GROUP].double() * token_scale.view(-1, 1)
    functions = {
        0: lambda t: t,
        1: lambda t: t.clamp(min=0),
        2: lambda t: t / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (t + 0.044715 * t**3))),
        4: lambda t: t / (1 + torch.exp(-1.702 * t)),
        5: lambda t: t / (1 + torch.exp(-t)),
    }
    options = {"per_token_scale": token_scale, "bias": bias, "act_type": act_type}
    got = quant_gmm(x, weight, scale, group_list=ENDS, **options)
    dtype = torch.bfloat16 if scale_type == torch.bfloat16 else torch.float16
    assert got.dtype == dtype
    expected = functions[act_type](total)
    torch.testing.assert_close(got.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(
        got, quant_gmm_v2(x, weight, scale, group_list=torch.tensor(COUNTS), **options)
    )


def test_the_kernel_gives_the_same_bits():
    x, weight, bias = case()
    scale = torch.rand(E, N) * 1e-4
    for kernel, plain, groups in (
        (triton_impl.quant_gmm, quant_gmm, ENDS),
        (triton_impl.quant_gmm_v2, quant_gmm_v2, COUNTS),
    ):
        got, want = (f(x, weight, scale, bias=bias, group_list=groups) for f in (kernel, plain))
        assert torch.equal(got, want) and want.any()


def test_back_to_int8():
    x, weight, _ = case()
    scale = torch.rand(E, N) * 5e-3
    packed = scale.view(torch.int32).long() | (7 << 40)  # only the low half counts
    offset = torch.randint(-3, 3, (E, N)).float()
    got = quant_gmm(x, weight, packed, offset=offset, group_list=ENDS)
    total = exact_gmm(x, weight) * scale[GROUP].double() + offset[GROUP]
    assert got.dtype == torch.int8
    assert torch.equal(got.double(), total.round().clamp(-128, 127))
    assert got.abs().max() >= 127  # something was cut off


def test_widened_matrices():
    x, weight, _ = case()
    x = torch.randn(M, K)
    scale, offset, bias = (
        torch.rand(E, N) / 50,
        torch.randint(-5, 5, (E, N)).float(),
        torch.randn(E, N),
    )
    got = weight_quant_gmm(x, weight, scale, offset, bias=bias, group_list=ENDS, act_type=1)
    dequantised = (weight.double() + offset.double().unsqueeze(1)) * scale.double().unsqueeze(1)
    expected = torch.stack(
        [x[m].double() @ dequantised[g] + bias[g] for m, g in enumerate(GROUP)]
    ).clamp(min=0)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.ones(M, K)}, "int8 by int8, got torch.float32"),
        ({"weight": torch.ones(E, K + 1, N, dtype=torch.int8)}, r"\(M, K\) by \(E, K, N\)"),
        ({"group_list": [5]}, "3 matrices and needs as many groups"),
        ({"act_type": 3}, "act_type=3: use 0, 1, 2, 4, 5"),
        ({"output_dtype": torch.float32}, "use float16, bfloat16 or int8"),
        ({"output_dtype": torch.int8, "act_type": 1}, "takes no act_type"),
    ],
)
def test_refuses(change, message):
    x, weight, _ = case()
    given = {"x": x, "weight": weight, "scale": torch.ones(E, N), "group_list": ENDS} | change
    with pytest.raises(ValueError, match=message):
        quant_gmm(given.pop("x"), given.pop("weight"), given.pop("scale"), **given)


def test_refuses_float_matrices():
    with pytest.raises(ValueError, match="float x by int8 matrices, got torch.float32 and"):
        weight_quant_gmm(torch.ones(2, 2), torch.ones(1, 2, 2), torch.ones(1, 2), torch.ones(1, 2))
