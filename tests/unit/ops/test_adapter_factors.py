"""Factors of adapters joined to two matrices, and the gradients of these, element by element."""

import pytest
import torch

from mindspeed.ops.adapter_factors import add_factor_gradients, join_factors, triton_impl
from mindspeed.ops.adapter_factors.reference import FactorLayout
from tests.unit.ops.pairwise import pairwise

JOIN = {"reference": join_factors, "triton": triton_impl.join_factors}
ADD = {"reference": add_factor_gradients, "triton": triton_impl.add_factor_gradients}
IMPLS = pytest.mark.parametrize("impl", JOIN)
# Rows of each projection of a layer, and which of them have an adapter.
LAYERS = {
    "one": ([7], [0]),
    "two": ([300, 300], [0, 1]),
    "qkv": ([130, 40, 40], [0, 1, 2]),
    "q and v": ([12, 4, 4], [0, 2]),
    "k": ([12, 4, 4], [1]),
    "four": ([3, 5, 2, 6], [0, 1, 2, 3]),
    "more than the kernel takes": ([3, 1, 2, 1, 4], [0, 1, 2, 3, 4]),
}
SCALE = 0.3


def draw(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def make(layer, is_ordered, rank, columns, dtype):
    """Return A and B of every adapter, and their layout."""
    sizes, adapted = LAYERS[layer]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    rows = [slice(starts[number], starts[number] + sizes[number]) for number in adapted]
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(1))
    inner = [draw(rank, columns, dtype=dtype) + number for number in adapted]
    outer = [draw(sizes[number], rank, dtype=dtype) + number for number in adapted]
    layout = FactorLayout(rows, sum(sizes), SCALE, order=order if is_ordered else None)
    return inner, outer, layout


def joined_by_hand(inner, outer, layout):
    """Return A and B in float64, written row by row."""
    rank = len(inner[0])
    b = torch.zeros(layout.size, rank * len(inner), dtype=torch.float64)
    for number, (rows, part) in enumerate(zip(layout.rows, outer, strict=True)):
        b[rows, number * rank : (number + 1) * rank] = part.double() * layout.scale
    return torch.cat(inner), b if layout.order is None else b[layout.order]


CASES = (
    pytest.mark.parametrize("layer", LAYERS),
    pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"]),
    pytest.mark.parametrize("rank", [1, 3, 16]),
    pytest.mark.parametrize("columns", [1, 100]),
)


@pairwise(
    IMPLS,
    *CASES,
    pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64]),
)
def test_joins(impl, layer, is_ordered, rank, columns, dtype):
    inner, outer, layout = make(layer, is_ordered, rank, columns, dtype)
    a, b = JOIN[impl](inner, outer, layout)
    expected_a, expected_b = joined_by_hand(inner, outer, layout)
    assert torch.equal(a, expected_a) and a.dtype == b.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(b.double(), expected_b, rtol=eps, atol=0.0)
    assert torch.equal(b == 0, expected_b == 0) and a.is_contiguous() and b.is_contiguous()
    if dtype != torch.bfloat16:  # Triton's interpreter truncates to it; tests/gpu compares
        assert torch.equal(b, join_factors(inner, outer, layout)[1])


@pairwise(
    IMPLS,
    *CASES,
    pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64]),
    pytest.mark.parametrize("total_dtype", [None, torch.float32]),
)
def test_adds_gradients(impl, layer, is_ordered, rank, columns, dtype, total_dtype):
    *factors, layout = make(layer, is_ordered, rank, columns, dtype)
    total_dtype = dtype if dtype == torch.float64 else total_dtype or dtype
    totals = [[draw(*part.shape, dtype=total_dtype) for part in parts] for parts in factors]
    before = [[total.double().clone() for total in part] for part in totals]
    a = draw(rank * len(factors[0]), columns, dtype=dtype)
    b = draw(layout.size, len(a), dtype=dtype)
    ADD[impl](a, b, *totals, layout)

    leaves = [[part.double().clone().requires_grad_() for part in parts] for parts in factors]
    whole = joined_by_hand(*leaves, layout)
    torch.autograd.backward(whole, [a.double(), b.double()])
    eps = torch.finfo(total_dtype).eps
    for part in range(2):
        for total, start, leaf in zip(totals[part], before[part], leaves[part], strict=True):
            expected = start + leaf.grad
            torch.testing.assert_close(total.double(), expected, rtol=eps, atol=4 * eps)


@IMPLS
def test_strided_gradients(impl):
    *factors, layout = make("qkv", True, 4, 10, torch.float32)
    a, b = draw(12, 20)[:, ::2], draw(24, layout.size).t()[:, :12]
    found, expected = ([[torch.zeros_like(x) for x in parts] for parts in factors] for _ in "12")
    ADD[impl](a, b, *found, layout)
    add_factor_gradients(a.contiguous(), b.contiguous(), *expected, layout)
    assert torch.equal(torch.cat(found[0]), torch.cat(expected[0])) and found[0][0].any()
    assert torch.equal(torch.cat(found[1]), torch.cat(expected[1])) and found[1][2].any()


def test_one_adapter_keeps_its_inner_factor():
    inner, outer, layout = make("one", False, 3, 5, torch.float32)
    for run in JOIN.values():
        a, _ = run(inner, outer, layout)
        assert a is not inner[0] and a.data_ptr() == inner[0].data_ptr()


def test_refuses_what_does_not_fit_and_a_gradient():
    inner, outer, layout = make("two", False, 3, 5, torch.float32)
    with pytest.raises(ValueError, match=r"B \[\(300, 3\), \(300, 3\)\], got .*\(299, 3\)\]"):
        join_factors(inner, [outer[0], outer[1][1:]], layout)
    with pytest.raises(ValueError, match="A .* of one shape"):
        join_factors(inner[:1], outer[:1], layout)
    with pytest.raises(ValueError, match=r"\(6, 5\) and \(600, 6\) of the layer, got \(3, 5\)"):
        add_factor_gradients(draw(3, 5), draw(600, 6), inner, outer, layout)
    with pytest.raises(ValueError, match="has no gradient"):
        join_factors([inner[0].requires_grad_(), inner[1]], outer, layout)
