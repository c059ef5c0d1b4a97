import pytest
import torch

from mindspeed.ops.gmm import gmm, gmm_v2, triton_impl
from mindspeed.ops.gmm.cuda_impl import _aligned, _is_supported
from mindspeed.ops.gmm.reference import LOOP

COUNTS = [3, 0, 1, 4]
ENDS = [3, 3, 4, 8]
M, K, N, E = 8, 6, 10, 4


def case(dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(M, K).to(dtype).requires_grad_()
    weight = torch.randn(E, K, N).to(dtype).requires_grad_()
    return x, weight


def one_by_one(x, weight, bias=None):
    out = torch.zeros(M, N, dtype=torch.float64)
    for row in range(M):
        group = sum(row >= end for end in ENDS)
        out[row] = x[row].double() @ weight[group].double()
        if bias is not None:
            out[row] += bias[group].double()
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [list, torch.tensor, lambda g: torch.tensor(g).int()])
def test_both_forms_equal_row_by_row(dtype, groups):
    x, weight = case(dtype)
    expected = one_by_one(x, weight)
    for out in (
        gmm(x, weight, group_list=groups(ENDS)),
        gmm_v2(x, weight, group_list=groups(COUNTS)),
    ):
        assert out.dtype == dtype and out.shape == (M, N)
        tolerance = {2: 2**-7, 4: 1e-5, 8: 1e-12}[dtype.itemsize]
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_gradients():
    x, weight = case()
    bias = torch.randn(E, N, dtype=torch.float64, requires_grad=True)
    groups = torch.tensor(COUNTS)
    run = lambda x, w, b: gmm_v2(x, w, bias=b, group_list=groups)  # noqa: E731
    torch.testing.assert_close(run(x, weight, bias), one_by_one(x, weight, bias))
    assert torch.autograd.gradcheck(run, (x, weight, bias))
    run(x, weight, bias).sum().backward()
    assert torch.equal(weight.grad[1], torch.zeros(K, N, dtype=torch.float64))


def test_strided_operands():
    x, weight = case()
    transposed = weight.detach().transpose(1, 2).contiguous().transpose(1, 2)
    x_t = x.detach().t().contiguous().t()
    torch.testing.assert_close(gmm(x_t, transposed, group_list=ENDS), one_by_one(x, weight))
    grads = lambda w: torch.autograd.grad(gmm(x, w, group_list=ENDS).sum(), [x, w])  # noqa: E731
    torch.testing.assert_close(grads(transposed.requires_grad_()), grads(weight))


def test_groups_of_the_summed_dimension():
    x, _ = case()
    y = torch.randn(M, N, dtype=torch.float64, requires_grad=True)
    out = gmm(x.t(), y, group_list=ENDS, group_type=2)
    assert out.shape == (E * K, N)
    start = 0
    for group, end in enumerate(ENDS):
        expected = torch.einsum("mk,mn->kn", x[start:end], y[start:end])
        torch.testing.assert_close(out[group * K : (group + 1) * K], expected)
        start = end
    run = lambda x, y: gmm(x.t(), y, group_list=ENDS, group_type=2)  # noqa: E731
    assert torch.autograd.gradcheck(run, (x, y))


def test_without_groups():
    xs = [torch.randn(3, 4), torch.randn(5, 6)]
    weights = [torch.randn(4, 2), torch.randn(6, 7)]
    biases = [torch.randn(2), torch.randn(7)]
    for out, x, weight, bias in zip(
        gmm(xs, weights, bias=biases, group_type=-1), xs, weights, biases
    ):
        torch.testing.assert_close(out, torch.addmm(bias, x, weight))
    assert torch.equal(gmm(xs[0], weights[0], group_type=-1), xs[0] @ weights[0])


@pytest.mark.parametrize("hooks", [True, False])
def test_fused_gradient_goes_to_main_grad(hooks):
    x, weight = case(torch.bfloat16)
    original = torch.nn.Parameter(weight.detach().reshape(E * K, N))
    original.main_grad = torch.ones(E * K, N)
    if hooks:
        original.grad_added_to_main_grad = False
    view = original.view(E, K, N)
    grad = torch.randn(M, N).bfloat16()
    out = gmm(x, view, group_list=ENDS, gemm_fusion=True, original_weight=original)
    out.backward(grad)
    _, plain = torch.autograd.grad(
        gmm(x.double(), weight.double(), group_list=ENDS), [x, weight], grad.double()
    )
    exact = 1 + torch.stack(
        [
            torch.einsum("mk,mn->kn", x[a:b].double(), grad[a:b].double())
            for a, b in zip([0, *ENDS], ENDS)
        ]
    )
    torch.testing.assert_close(original.main_grad.view(E, K, N).double(), exact)
    assert (exact.bfloat16().double() - exact).abs().max() > 1e-3  # rounding would have shown
    assert (original.grad is not None) == hooks
    assert getattr(original, "grad_added_to_main_grad", False) == hooks


def test_nothing_else_is_kept_for_backward():
    x, weight = case(torch.float32)
    ends = torch.tensor(ENDS, dtype=torch.int32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gmm(x, weight, group_list=ends)
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), weight.data_ptr(), ends.data_ptr()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("strided", [True, False])
def test_the_kernel_equals_the_loop(dtype, strided, monkeypatch):
    for name in ("_BLOCK_M", "_BLOCK_N", "_BLOCK_K"):
        monkeypatch.setattr(triton_impl, name, 16)
    torch.manual_seed(2)
    ends = torch.tensor([0, 20, 20, 21, 54, 54], dtype=torch.int32)
    x, weight = torch.randn(54, 40).to(dtype), torch.randn(6, 40, 19).to(dtype)
    if strided:
        x = torch.randn(40, 108).to(dtype).t()[::2]
        weight = torch.randn(6, 19, 80).to(dtype).transpose(1, 2)[:, ::2]
    y = torch.randn(54, 19).to(dtype)
    exact_inputs = [t.double() for t in (x, weight, y)]
    tolerance = (
        {"rtol": 2e-3, "atol": 2e-2} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-4}
    )
    exact = LOOP.rows(exact_inputs[0], exact_inputs[1], ends)
    torch.testing.assert_close(triton_impl.rows(x, weight, ends).double(), exact, **tolerance)
    exact = LOOP.outer(exact_inputs[0], exact_inputs[2], ends)
    got = triton_impl.outer(x, y, ends)
    assert got.dtype == dtype and not got[0].any() and not got[5].any()
    torch.testing.assert_close(got.double(), exact, **tolerance)
    assert triton_impl.rows(x[:0], weight, ends * 0).shape == (0, 19)


def test_empty_input():
    weight = torch.randn(E, K, N, requires_grad=True)
    out = gmm(torch.empty(0, K), weight, group_list=[0] * E)
    out.sum().backward()
    assert out.shape == (0, N) and torch.equal(weight.grad, torch.zeros(E, K, N))


def test_what_the_grouped_kernel_takes():
    assert _is_supported(torch.bfloat16, 8, 64)
    assert not _is_supported(torch.bfloat16, 8, 12) and not _is_supported(torch.float32, 8, 64)
    x = torch.randn(16, 24).bfloat16()
    assert _aligned(x) is x and _aligned(x.t()).data_ptr() == x.data_ptr()
    assert _aligned(x[:, 1:9]).is_contiguous() and _aligned(x[:, ::2]).is_contiguous()
    expanded = torch.randn(1, 24).bfloat16().expand(16, 24)
    assert _aligned(expanded).is_contiguous()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"group_type": 1}, "group_type=1: use -1"),
        ({"group_list": None}, "needs a group_list"),
        ({"group_list": [3, 8]}, "4 matrices for 2 groups"),
        ({"group_list": [3, 2, 4, 8]}, "the ends must not fall"),
        ({"group_list": [3, 3, 4, 7]}, "for 8 rows"),
        ({"group_list": torch.ones(4)}, "of integers in one dimension"),
        ({"weight": torch.ones(E, K + 1, N)}, r"cannot multiply \(8, 6\)"),
        ({"weight": torch.ones(K, N)}, "2 and 3 dimensions, got 2 and 2"),
        ({"bias": torch.ones(N)}, r"bias of \(4, 10\), got \(10,\)"),
        ({"gemm_fusion": True}, "pass the parameter that has one"),
        ({"group_type": -1}, "drop group_list"),
        ({"group_type": -1, "group_list": None, "x": [torch.ones(2, 2)]}, "not some of each"),
    ],
)
def test_refuses(change, message):
    given = {"x": torch.ones(M, K), "weight": torch.ones(E, K, N), "group_list": ENDS} | change
    with pytest.raises(ValueError, match=message):
        gmm(given.pop("x"), given.pop("weight"), **given)
