"""Normed and rotated heads at real sizes: error, equal bits, launches, memory, torch.compile."""

import pytest
import torch

from mindspeed import device
from mindspeed.ops.norm_rotate_qkv import norm_rotate_qkv, reference
from tests.gpu.ops.forward_backward import run

pytestmark = pytest.mark.gpu
S, B, EPS = 1000, 2, 1e-6
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def angles(length, dim):
    per_pair = torch.outer(torch.arange(length).double(), 1e-6 ** (torch.arange(dim // 2) / dim))
    return torch.cat([per_pair] * 2, -1).float().view(length, 1, 1, dim).cuda()


def inputs(queries, groups, head, dtype, tokens=S):
    torch.manual_seed(0)
    qkv = torch.randn(tokens, B, groups, (queries + 2) * head, device="cuda").to(dtype)
    weights = (torch.randn(head, device="cuda").to(dtype) for _ in range(2))
    return (qkv, *weights), [queries * head, head, head]


def check(ours, plain, given, dtype):
    got, again = run(ours, given), run(ours, given)
    exact = run(plain, [x.double() for x in given])
    for mine, twice, true in zip(got, again, exact, strict=True):
        assert torch.equal(mine, twice), "two runs differ"
        assert mine.dtype == dtype
        error = (mine.double() - true).norm() / true.norm()
        # Rounded once, to half a unit in the last place at most.
        assert error < 2e-6 + (0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2)


@DTYPES
@pytest.mark.parametrize(
    ("queries", "groups"), [(8, 4), (4, 8), (1, 5)], ids=["30B", "8B", "every head its key"]
)
@pytest.mark.parametrize(("dim", "head"), [(128, 128), (64, 64), (64, 128), (24, 96), (256, 256)])
def test_float64(dim, head, queries, groups, dtype):
    given, sizes = inputs(queries, groups, head, dtype)
    freqs = angles(S, dim)
    check(
        lambda *x: norm_rotate_qkv(*x, freqs, sizes, EPS),
        lambda *x: reference.norm_rotate_qkv(*x, freqs.double(), sizes, EPS),
        given,
        dtype,
    )


@DTYPES
@pytest.mark.parametrize("shape", [(S,), (S, B)], ids=["token", "token of each sequence"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_positions(zero_centered, shape, dtype):
    given, sizes = inputs(8, 4, 128, dtype)
    freqs = angles(S, 128)
    options = {
        "positions": torch.randint(0, S, shape, device="cuda"),
        "zero_centered": zero_centered,
    }
    check(
        lambda *x: norm_rotate_qkv(*x, freqs, sizes, EPS, **options),
        lambda *x: reference.norm_rotate_qkv(*x, freqs.double(), sizes, EPS, **options),
        given,
        dtype,
    )


def test_one_launch_each_way_and_one_for_the_sums():
    given, sizes = inputs(8, 4, 128, torch.bfloat16)
    given, freqs = [x.requires_grad_() for x in given], angles(S, 128)
    grads = [torch.randn_like(out) for out in norm_rotate_qkv(*given, freqs, sizes, EPS)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(norm_rotate_qkv(*given, freqs, sizes, EPS), given, grads)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if "CUDA" in str(event.device_type)]
    assert len(kernels) == 3, [event.name for event in kernels]


def test_memory():
    given, sizes = inputs(8, 4, 128, torch.bfloat16, tokens=4096)
    given, freqs = [x.requires_grad_() for x in given], angles(4096, 128)
    norm_rotate_qkv(*given, freqs, sizes, EPS)  # the tables
    here = device.current()
    before = here.memory_allocated()
    outs = norm_rotate_qkv(*given, freqs, sizes, EPS)
    # The results, and nothing else for backward than the packed tensor that is there already.
    assert here.memory_allocated() - before <= given[0].nbytes + 2**16
    grads = [torch.ones_like(out) for out in outs]
    at_backward = here.memory_allocated()
    here.reset_peak_memory()
    torch.autograd.grad(outs, given, grads)
    assert here.max_memory_allocated() - at_backward <= given[0].nbytes + 2**20


def test_compiles_without_a_graph_break():
    given, sizes = inputs(8, 4, 128, torch.bfloat16)
    freqs = angles(S, 128)
    compiled = torch.compile(lambda *x: norm_rotate_qkv(*x, freqs, sizes, EPS), fullgraph=True)
    plain = run(lambda *x: norm_rotate_qkv(*x, freqs, sizes, EPS), given)
    for got, want in zip(run(compiled, given), plain, strict=True):
        torch.testing.assert_close(got, want)
