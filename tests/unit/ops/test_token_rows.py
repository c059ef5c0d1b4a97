import pytest
import torch

from mindspeed.ops.token_rows import gather_rows, reference, spread_rows, triton_impl
from tests.unit.ops.pairwise import pairwise

H = 7
# Token 0 has rows 2 and 0, token 1 none, token 2 row 1, token 3 rows 4 and 3, no token row 5.
ROW_IDS, STARTS, ROWS = [2, 0, 1, 4, 3, 5], [0, 2, 2, 3, 5], 6
OWNER = [0, 2, 0, 3, 3, None]
EVEN = torch.tensor([[3, 0], [1, 5], [4, 2]], dtype=torch.int32)
IMPLS = pytest.mark.parametrize("impl", [reference, triton_impl], ids=["reference", "triton"])


def ragged():
    return torch.tensor(ROW_IDS, dtype=torch.int32), torch.tensor(STARTS)


@IMPLS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_spread_copies_and_fills(impl, dtype):
    tokens = torch.randn(4, H).to(dtype)
    row_ids, starts = ragged()
    rows = impl.spread_rows(tokens, row_ids, ROWS, starts)
    for row, owner in zip(rows, OWNER):
        assert torch.equal(row, torch.zeros(H, dtype=dtype) if owner is None else tokens[owner])
    even = impl.spread_rows(tokens[:3], EVEN, 5)  # row 5 is dropped
    assert torch.equal(even, tokens[[0, 1, 2, 0, 2]])


@pairwise(
    IMPLS,
    pytest.mark.parametrize("weighted", [True, False]),
    pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16]),
)
def test_gather_sums_in_float32(impl, dtype, weighted):
    torch.manual_seed(0)
    rows = torch.randn(ROWS, H).to(dtype)
    row_ids, starts = ragged()
    weights = torch.rand(6) if weighted else None
    got = impl.gather_rows(rows, row_ids, weights, starts)
    expected = torch.zeros(4, H, dtype=torch.float64)
    for token in range(4):
        for index in range(STARTS[token], STARTS[token + 1]):
            weight = weights[index].double() if weighted else 1.0
            expected[token] += rows[ROW_IDS[index]].double() * weight
    assert got.dtype == dtype and got.shape == (4, H)
    eps = max(torch.finfo(dtype).eps, 1e-7)
    torch.testing.assert_close(got.double(), expected, rtol=eps, atol=1e-6)


@IMPLS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_back_can_be_changed_in_place(impl, dtype):
    rows = torch.randn(ROWS, H).to(dtype).requires_grad_()
    row_ids, starts = ragged()
    tokens = impl.gather_rows(rows, row_ids, None, starts).view(2, 2, H)
    tokens += 1  # so Megatron adds the output of shared experts
    again = impl.spread_rows(tokens.view(4, H), row_ids, ROWS, starts).view(2, 3, H)
    again *= 2
    again.sum().backward()
    assert rows.grad[0].tolist() == [4.0] * H and rows.grad[5].tolist() == [0.0] * H


@pytest.mark.parametrize("even", [True, False])
def test_gradients(even):
    row_ids, starts = (EVEN, None) if even else ragged()
    count = 3 if even else 4
    tokens = torch.randn(count, H, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(ROWS, H, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(row_ids.shape, dtype=torch.float64, requires_grad=True)
    check = torch.autograd.gradcheck
    assert check(lambda t: spread_rows(t, row_ids, ROWS, starts), tokens)
    assert check(lambda r, w: gather_rows(r, row_ids, w, starts), (rows, weights))
    assert check(lambda r: gather_rows(r, row_ids, None, starts), rows)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_gradients_equal_the_reference(even, dtype):
    torch.manual_seed(1)
    row_ids, starts = (EVEN, None) if even else ragged()
    rows = torch.randn(ROWS, 2 * H).to(dtype)[:, ::2].requires_grad_()
    weights = torch.rand(row_ids.shape, requires_grad=True)
    grad = torch.randn(3 if even else 4, H).to(dtype)
    results = []
    for impl in (reference, triton_impl):
        out = impl.gather_rows(rows, row_ids, weights, starts)
        results.append((out, *torch.autograd.grad(out, [rows, weights], grad)))
        tokens = grad.clone().requires_grad_()
        spread = impl.spread_rows(tokens, row_ids, ROWS, starts)
        results[-1] += torch.autograd.grad(spread, tokens, rows.detach())
    torch.testing.assert_close(*results)
    assert all(one.dtype == two.dtype for one, two in zip(*results))


@IMPLS
def test_no_tokens_and_no_rows(impl):
    none = torch.empty(0, 2, dtype=torch.int32)
    assert impl.spread_rows(torch.empty(0, H), none, 0).shape == (0, H)
    assert impl.gather_rows(torch.empty(0, H), none, torch.empty(0, 2)).shape == (0, H)
    dropped = torch.full((3, 2), 5)
    assert torch.equal(impl.gather_rows(torch.empty(0, H), dropped), torch.zeros(3, H))
    row_ids, starts = torch.empty(0, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    assert torch.equal(impl.spread_rows(torch.randn(3, H), row_ids, 2, starts), torch.zeros(2, H))


@pytest.mark.parametrize("weighted", [True, False])
def test_only_what_the_gradient_needs_is_kept(weighted):
    row_ids, starts = ragged()
    rows = torch.randn(ROWS, H, requires_grad=True)
    weights = torch.rand(6, requires_grad=True)
    kept = [rows, row_ids, starts, weights] if weighted else [row_ids, starts]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gather_rows(rows, row_ids, weights if weighted else None, starts)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in kept]


def test_refuses_what_does_not_fit():
    row_ids, starts = ragged()
    with pytest.raises(ValueError, match=r"needs 4 tokens .* got tokens of shape \(3, 7\)"):
        spread_rows(torch.ones(3, H), row_ids, ROWS, starts)
    with pytest.raises(ValueError, match=r"row_ids must be integers, \(T, k\) or \(P,\)"):
        spread_rows(torch.ones(3, H), row_ids, ROWS)
    with pytest.raises(ValueError, match=r"each of row_ids \(6,\), got \(5,\)"):
        gather_rows(torch.ones(ROWS, H), row_ids, torch.ones(5), starts)
    with pytest.raises(ValueError, match=r"needs rows \(R, H\), got \(6,\)"):
        gather_rows(torch.ones(ROWS), row_ids, None, starts)
