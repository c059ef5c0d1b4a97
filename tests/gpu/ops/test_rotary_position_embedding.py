"""The rotary kernel at real sizes: error, equal bits, launches, torch.compile."""

import pytest
import torch

from mindspeed.ops.rotary_position_embedding import (
    reference,
    rotary_position_embedding,
    rotate_qk,
    rotate_qkv,
)
from tests.gpu.ops.forward_backward import run

pytestmark = pytest.mark.gpu
S, B, N, G = 1024, 2, 12, 2


def angles(length, dim):
    per_pair = torch.outer(torch.arange(length).double(), 1e-6 ** (torch.arange(dim // 2) / dim))
    return torch.cat([per_pair] * 2, -1).float().view(length, 1, 1, dim).cuda()


def check(ours, plain, inputs, dtype):
    got, again = run(ours, inputs), run(ours, inputs)
    exact = run(plain, [x.double() for x in inputs])
    for mine, twice, true in zip(got, again, exact, strict=True):
        assert torch.equal(mine, twice), "two runs differ"
        assert mine.dtype == dtype
        error = (mine.double() - true).norm() / true.norm()
        assert error < (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 3)


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "head"), [(128, 128), (64, 64), (24, 96)])
def test_queries_and_keys(dim, head, interleaved, dtype):
    torch.manual_seed(0)
    q, k = (torch.randn(S, B, n, head, device="cuda").to(dtype) for n in (N, G))
    freqs = angles(S, dim)
    check(
        lambda q, k: rotate_qk(q, k, freqs, None, interleaved),
        lambda q, k: reference.rotate_qk(q, k, freqs.double(), None, interleaved),
        (q, k),
        dtype,
    )


@DTYPES
@pytest.mark.parametrize("groups", [1, 2, 12])
@pytest.mark.parametrize("has_positions", [False, True])
def test_packed(groups, has_positions, dtype):
    torch.manual_seed(0)
    positions = torch.randint(0, S, (S,), device="cuda") if has_positions else None
    sizes = [N // groups * 128, 128, 128]
    qkv = torch.randn(S, B, groups, sum(sizes), device="cuda").to(dtype)
    freqs = angles(S, 128)
    check(
        lambda x: rotate_qkv(x, freqs, sizes, positions=positions),
        lambda x: reference.rotate_qkv(x, freqs.double(), sizes, positions=positions),
        (qkv,),
        dtype,
    )


@DTYPES
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "SBND"])
def test_tables(layout, mode, dtype):
    torch.manual_seed(0)
    sizes = {"B": B, "N": N, "S": S, "D": 128}
    x = torch.randn([sizes[c] for c in layout], device="cuda").to(dtype)
    table = [sizes[c] if c in "SD" else 1 for c in layout]
    cos, sin = angles(S, 128).cos().view(table), angles(S, 128).sin().view(table)
    check(
        lambda x: rotary_position_embedding(x, cos, sin, mode),
        lambda x: reference.rotary_position_embedding(x, cos.double(), sin.double(), mode),
        (x,),
        dtype,
    )


def test_one_launch_each_way():
    q, k = (torch.randn(S, B, n, 128, device="cuda", requires_grad=True) for n in (N, G))
    freqs = angles(S, 128)
    grads = [torch.randn_like(out) for out in rotate_qk(q, k, freqs)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(rotate_qk(q, k, freqs), (q, k), grads)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if "CUDA" in str(event.device_type)]
    assert len(kernels) == 2, [event.name for event in kernels]


def test_compiles_without_a_graph_break():
    q, k = (torch.randn(S, B, n, 128, device="cuda", dtype=torch.bfloat16) for n in (N, G))
    freqs = angles(S, 128)
    compiled = torch.compile(lambda q, k: rotate_qk(q, k, freqs), fullgraph=True)
    for got, want in zip(run(compiled, (q, k)), run(lambda *x: rotate_qk(*x, freqs), (q, k))):
        torch.testing.assert_close(got, want)
