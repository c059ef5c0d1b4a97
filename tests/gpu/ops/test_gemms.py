"""Weight gradients and grouped GEMMs on the GPU against float64, compared with eager torch."""

import pytest
import torch

from mindspeed import device
from mindspeed.ops.gmm import gmm, gmm_v2
from mindspeed.ops.gmm.reference import LOOP
from mindspeed.ops.groupmatmul_add_fp32 import groupmatmul_add_fp32
from mindspeed.ops.matmul_add_fp32 import matmul_add_fp32
from mindspeed.ops.quant_gmm import quant_gmm
from mindspeed.ops.quant_gmm.reference import quant_gmm as plain_quant_gmm
from mindspeed.te.pytorch import GroupedLinear

pytestmark = pytest.mark.gpu
# Empty groups first, between and last, one of a single row, one that ends amid a tile.
COUNTS = [0, 300, 0, 0, 1, 129, 640, 0]


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=device.current().torch_device).to(dtype)


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def groups():
    counts = torch.tensor(COUNTS, device=device.current().torch_device)
    return counts, counts.cumsum(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(4096, 1536, 8960), (77, 130, 51)], ids=str)
def test_weight_gradient_is_not_rounded(shape, dtype):
    torch.manual_seed(0)
    rows, wide_in, wide_out = shape
    x, dy = drawn(rows, wide_in, dtype=dtype), drawn(rows, wide_out, dtype=dtype)
    start = drawn(wide_out, wide_in, dtype=torch.float32)
    exact = start.double() + dy.double().t() @ x.double()
    sums = [start.clone() for _ in range(2)]
    for total in sums:
        matmul_add_fp32(x, dy, total)
    assert torch.equal(*sums)
    assert error(sums[0], exact) <= 1e-5  # 4e-6 seen; rounding to bfloat16 would cost 1e-3


def test_weight_gradient_of_a_torch_without_float32_results(monkeypatch):
    monkeypatch.setattr("mindspeed.ops.fp32_gemm.HAS_FP32_RESULTS", False)
    monkeypatch.setattr("mindspeed.ops.matmul_add_fp32.cuda_impl._adds_into_float32", lambda *_: 0)
    test_weight_gradient_is_not_rounded((77, 130, 51), torch.bfloat16)


def test_weight_gradient_needs_no_temporary():
    current = device.current()
    x, dy = drawn(1024, 4096), drawn(1024, 4096)
    total = torch.zeros(4096, 4096, device=x.device)
    matmul_add_fp32(x, dy, total)  # the library's workspace is there after this
    before = current.memory_allocated()
    current.reset_peak_memory()
    matmul_add_fp32(x, dy, total)
    assert current.max_memory_allocated() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("widths", [(256, 512), (1024, 384), (100, 36)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_gemms_are_no_worse_than_eagers(widths, dtype, transposed):
    torch.manual_seed(1)
    counts, ends = groups()
    wide_in, wide_out = widths
    x, dy = drawn(sum(COUNTS), wide_in, dtype=dtype), drawn(sum(COUNTS), wide_out, dtype=dtype)
    weight = drawn(len(COUNTS), wide_in, wide_out, dtype=dtype)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)

    def run(x, weight, form):
        x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
        out = form(x, weight)
        return [out.detach(), *torch.autograd.grad(out, [x, weight], dy.to(out.dtype))]

    def loop(x, weight):
        pieces = [part @ matrix for part, matrix in zip(x.split(COUNTS), weight)]
        return torch.cat(pieces)

    exact = run(x.double(), weight.double(), loop)
    eager = run(x, weight, loop)
    first, second = (run(x, weight, lambda x, w: gmm(x, w, group_list=ends)) for _ in range(2))
    sizes = run(x, weight, lambda x, w: gmm_v2(x, w, group_list=counts))
    for truth, plain, got, again, same in zip(exact, eager, first, second, sizes):
        assert torch.equal(got, again) and torch.equal(got, same)
        assert error(got, truth) <= error(plain, truth) * 1.05 + 1e-7
    for group, count in enumerate(COUNTS):
        if count == 0:
            assert not first[2][group].any(), f"the gradient of empty group {group} is not zero"


def test_groups_of_the_summed_dimension_and_bias():
    _, ends = groups()
    x, y = drawn(sum(COUNTS), 64), drawn(sum(COUNTS), 128)
    got = gmm(x.t(), y, group_list=ends, group_type=2).view(len(COUNTS), 64, 128)
    exact = LOOP.outer(x.double(), y.double(), ends)
    assert error(got, exact) <= 4e-3
    weight, bias = drawn(len(COUNTS), 64, 128), drawn(len(COUNTS), 128).requires_grad_()
    out = gmm(x, weight, bias=bias, group_list=ends)
    plain = gmm(x, weight, group_list=ends)
    rows = torch.cat([one.expand(n, -1) for one, n in zip(bias, COUNTS)])
    assert torch.equal(out, plain + rows)
    out.backward(y)
    sums = torch.stack([part.double().sum(0) for part in y.split(COUNTS)])
    assert error(bias.grad, sums) <= 4e-3


def test_counts_are_not_waited_for():
    # A captured graph admits no synchronisation, and replays with the counts it then finds.
    counts, _ = groups()
    x, weight = drawn(sum(COUNTS), 64), drawn(len(COUNTS), 64, 128)
    gmm_v2(x, weight, group_list=counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gmm_v2(x, weight, group_list=counts)
    counts.copy_(counts.flip(0))
    graph.replay()
    expected = torch.cat([p @ w for p, w in zip(x.split(COUNTS[::-1]), weight)])
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("widths", [(256, 512), (1024, 384), (100, 36)], ids=str)
@pytest.mark.parametrize("memory", ["together", "reversed", "apart"])
@pytest.mark.parametrize("long", [1024, 1], ids=["narrow tiles", "wide tiles"])
def test_grouped_weight_gradients_are_not_rounded(widths, dtype, memory, long, monkeypatch):
    # By name: no kernel may be imported where the tests of others are to run it interpreted.
    monkeypatch.setattr("mindspeed.ops.groupmatmul_add_fp32.triton_impl._LONG", long)
    torch.manual_seed(2)
    _, ends = groups()
    x, dy = (drawn(sum(COUNTS), width, dtype=dtype) for width in widths)
    start = drawn(len(COUNTS), *widths, dtype=torch.float32)
    exact = start.double() + LOOP.outer(x.double(), dy.double(), ends)
    results = []
    for _ in range(2):
        total = start.clone()
        out = total
        if memory == "reversed":
            block = total.flip(0).contiguous()
            out = [block[len(COUNTS) - 1 - i] for i in range(len(COUNTS))]
        elif memory == "apart":
            out = [one.clone() for one in total]
        groupmatmul_add_fp32(x, dy, ends, out)
        results.append(torch.stack(list(out)))
    assert torch.equal(*results)
    assert error(results[0], exact) <= 1e-5  # rounding to bfloat16 would cost 1e-3
    assert torch.equal(results[0][0], start[0])


def test_grouped_weight_gradients_need_no_temporary():
    current = device.current()
    _, ends = groups()
    ends = ends.int()
    x, dy = drawn(sum(COUNTS), 1024), drawn(sum(COUNTS), 1024)
    total = torch.zeros(len(COUNTS), 1024, 1024, device=x.device)
    groupmatmul_add_fp32(x, dy, ends, total)
    before = current.memory_allocated()
    current.reset_peak_memory()
    groupmatmul_add_fp32(x, dy, ends, total)
    assert current.max_memory_allocated() == before


@pytest.mark.parametrize("widths", [(256, 512), (100, 36)], ids=str)
def test_int8_products_are_exact(widths):
    _, ends = groups()
    wide_in, wide_out = widths
    where = device.current().torch_device
    x = torch.randint(-128, 128, (sum(COUNTS), wide_in), device=where, dtype=torch.int8)
    weight = torch.randint(-128, 128, (len(COUNTS), *widths), device=where, dtype=torch.int8)
    scale = torch.rand(len(COUNTS), wide_out, device=where) * 1e-4
    runs = (quant_gmm, plain_quant_gmm)
    got, want = (run(x, weight, scale, group_list=ends) for run in runs)
    assert torch.equal(got, want) and want.any()


@pytest.mark.parametrize("fused", [True, False])
def test_the_module_of_experts_equals_a_loop(fused):
    torch.manual_seed(3)
    where = device.current().torch_device
    module = GroupedLinear(
        len(COUNTS),
        256,
        384,
        bias=False,
        params_dtype=torch.bfloat16,
        device=where,
        fuse_wgrad_accumulation=fused,
    )
    weights = [getattr(module, f"weight{index}") for index in range(len(COUNTS))]
    buffer = torch.ones(len(COUNTS), 384, 256, device=where)
    for weight, total in zip(weights, buffer.flip(0)):
        weight.main_grad = total
    x, dy = drawn(sum(COUNTS), 256).requires_grad_(), drawn(sum(COUNTS), 384)
    out = module(x, COUNTS)
    out.backward(dy)
    parts = zip(x.detach().split(COUNTS), dy.split(COUNTS), weights)
    for index, (rows, grads, weight) in enumerate(parts):
        exact = grads.double().t() @ rows.double()
        if fused:
            torch.testing.assert_close(weight.main_grad.double(), exact + 1, rtol=1e-4, atol=1e-4)
        elif COUNTS[index]:
            assert error(weight.grad, exact) <= 4e-3
        else:
            assert not weight.grad.any()
    expected = torch.cat([p.double() @ w.double().t() for p, w in zip(x.split(COUNTS), weights)])
    assert error(out, expected) <= 4e-3
    backward = torch.cat([g.double() @ w.double() for g, w in zip(dy.split(COUNTS), weights)])
    assert error(x.grad, backward) <= 4e-3
