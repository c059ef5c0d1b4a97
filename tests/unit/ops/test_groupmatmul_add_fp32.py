import pytest
import torch

from mindspeed.ops.groupmatmul_add_fp32 import groupmatmul_add_fp32
from mindspeed.ops.groupmatmul_add_fp32 import triton_impl as kernel
from tests.unit.ops.pairwise import pairwise

ENDS = [5, 5, 6, 9]
IMPLS = [groupmatmul_add_fp32, kernel.groupmatmul_add_fp32]


def exact(x, dy, out):
    start, sums = 0, []
    for end, total in zip(ENDS, out):
        mask = torch.zeros(len(x), 1, dtype=torch.float64)
        mask[start:end] = 1
        sums.append(total.double() + torch.einsum("mk,mn->kn", x.double() * mask, dy.double()))
        start = end
    return torch.stack(sums)


def case(dtype, k=6, n=10):
    torch.manual_seed(0)
    x, dy = torch.randn(9, k).to(dtype), torch.randn(9, n).to(dtype)
    return x, dy, torch.randn(4, k, n)


@pairwise(
    pytest.mark.parametrize("run", IMPLS, ids=["reference", "triton"]),
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16]),
    pytest.mark.parametrize("as_list", [True, False]),
)
def test_adds_the_gemm_of_each_group(run, dtype, as_list):
    if run is IMPLS[1] and dtype == torch.bfloat16:
        dtype = torch.float16  # Triton's interpreter multiplies no bfloat16; tests/gpu does
    x, dy, out = case(dtype)
    expected = exact(x, dy, out)
    empty = out[1].clone()
    assert run(x, dy, ENDS if as_list else torch.tensor(ENDS), out) is None
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(out[1], empty)


@pytest.mark.parametrize("run", IMPLS, ids=["reference", "triton"])
@pytest.mark.parametrize("memory", ["reversed", "scattered", "transposed"])
def test_outputs_may_be_anywhere_in_memory(run, memory):
    x, dy, out = case(torch.float16)
    expected = exact(x, dy, out)
    buffer = torch.full((9, 6, 10), torch.nan)
    slots = {"reversed": [8, 6, 4, 2], "scattered": [3, 0, 7, 5], "transposed": [0, 1, 2, 3]}
    totals = [buffer[slot] for slot in slots[memory]]
    if memory == "transposed":
        totals = [torch.empty(10, 6).t() for _ in range(4)]
    for total, first in zip(totals, out):
        total.copy_(first)
    run(x, dy, ENDS, totals)
    torch.testing.assert_close(torch.stack(totals).double(), expected, rtol=1e-6, atol=1e-5)
    assert buffer.isnan().all(-1).all(-1).sum() == (9 if memory == "transposed" else 5)


def test_kernel_with_several_tiles_and_strided_inputs():
    torch.manual_seed(1)
    x, dy = torch.randn(150, 9).t().half(), torch.randn(9, 600).half()[:, ::2]
    out = torch.zeros(4, 150, 300)
    kernel.groupmatmul_add_fp32(x, dy, torch.tensor(ENDS), out)
    torch.testing.assert_close(
        out.double(), exact(x, dy, torch.zeros_like(out)), rtol=1e-5, atol=1e-5
    )


def test_long_groups_use_wide_tiles(monkeypatch):
    monkeypatch.setattr(kernel, "_LONG", 2)  # nine rows in four groups are long then
    torch.manual_seed(4)
    x, dy = torch.randn(9, 130).half(), torch.randn(9, 260).half()
    out = torch.zeros(4, 130, 260)
    kernel.groupmatmul_add_fp32(x, dy, ENDS, out)
    expected = exact(x, dy, torch.zeros_like(out))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_float64_and_no_rows():
    x, dy, out = case(torch.float64)
    out = out.double()
    expected = exact(x, dy, out)
    kernel.groupmatmul_add_fp32(x, dy, ENDS, out)
    torch.testing.assert_close(out, expected)
    for run in IMPLS:
        total = torch.ones(2, 6, 10)
        run(torch.empty(0, 6), torch.empty(0, 10), [0, 0], total)
        assert torch.equal(total, torch.ones(2, 6, 10))


def test_refuses_what_does_not_fit():
    x, dy, out = case(torch.float32)
    with pytest.raises(ValueError, match=r"\(9, 6\) of torch.float32 and \(8, 10\)"):
        groupmatmul_add_fp32(x, dy[:8], ENDS, out)
    with pytest.raises(ValueError, match=r"adds to 4 x \(6, 10\) numbers of torch.float32"):
        groupmatmul_add_fp32(x, dy, ENDS, out[:3])
    with pytest.raises(ValueError, match="torch.bfloat16"):
        groupmatmul_add_fp32(x, dy, ENDS, out.bfloat16())
