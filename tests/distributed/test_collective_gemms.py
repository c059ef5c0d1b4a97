"""GEMMs fused with an all-reduce equal their unfused composition."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.same_numbers import shared
from tests.ranks import run_ranks

H, M = 8, 6
K, N = 64, 5  # of the int8 GEMMs


def mm_all_reduce(slices_rows, in_place, by_name):
    from mindspeed.ops import npu_mm_all_reduce_add_rms_norm, npu_mm_all_reduce_add_rms_norm_

    rank, size = dist.get_rank(), dist.get_world_size()
    x, w = shared(0, 2, slices_rows, H * size), shared(1, H * size, M)
    residual, gamma, bias = shared(2, 2, slices_rows, M), shared(3, M), shared(4, M)
    mine = slice(rank * H, (rank + 1) * H)
    hcom = dist.group.WORLD.group_name if by_name else dist.group.WORLD
    run = npu_mm_all_reduce_add_rms_norm_ if in_place else npu_mm_all_reduce_add_rms_norm
    before = residual.clone()
    y, norm = run(x[..., mine], w[mine], residual, gamma, hcom, "sum", 1e-5, bias)
    expected = x @ w + size * bias + before
    torch.testing.assert_close(y, expected)
    rms = expected.square().mean(-1, keepdim=True).add(1e-5).rsqrt()
    torch.testing.assert_close(norm, expected * rms * gamma)
    assert (y.data_ptr() == residual.data_ptr()) == in_place
    assert torch.equal(residual, before) != in_place


@pytest.mark.parametrize("rows", [4, 3])
@pytest.mark.parametrize("in_place, by_name", [(False, False), (True, True)])
def test_mm_all_reduce_add_rms_norm(rows, in_place, by_name):
    run_ranks(mm_all_reduce, 2, rows, in_place, by_name)


def quantised():
    """Return this rank's slice of the summed dimension, int8 matrices, a residual and a gamma."""
    draw, rank = torch.Generator().manual_seed(5), dist.get_rank()
    x = torch.randint(-128, 128, (3, 2 * K), generator=draw, dtype=torch.int8)
    w = torch.randint(-128, 128, (2 * K, N), generator=draw, dtype=torch.int8)
    mine = slice(rank * K, (rank + 1) * K)
    return mine, x, w, torch.randn(3, N, generator=draw), torch.ones(N), draw


def mm_all_reduce_int8():
    from mindspeed.ops.mm_all_reduce_add_rms_norm import mm_all_reduce_add_rms_norm as run

    mine, x, w, residual, gamma, draw = quantised()
    bias = torch.randint(-100, 100, (N,), generator=draw, dtype=torch.int32)
    scale = torch.rand(N, generator=draw) * 1e-3
    given = x[:, mine], w[mine], residual, gamma, dist.group.WORLD
    y, _ = run(*given, bias=bias, dequant_scale=scale)
    whole = (x.double() @ w.double() + 2 * bias) * scale + residual
    torch.testing.assert_close(y.double(), whole, rtol=1e-5, atol=1e-4)


def mm_all_reduce_int8_weights():
    from mindspeed.ops.mm_all_reduce_add_rms_norm import mm_all_reduce_add_rms_norm as run

    mine, _, w, residual, gamma, draw = quantised()
    x = torch.randn(3, 2 * K, generator=draw)
    scale, offset = (torch.rand(2 * K // 32, N, generator=draw) for _ in range(2))
    rank = dist.get_rank()
    groups = slice(rank * 2, rank * 2 + 2)
    given = x[:, mine], w[mine], residual, gamma, dist.group.WORLD
    y, _ = run(
        *given,
        antiquant_scale=scale[groups],
        antiquant_offset=offset[groups],
        antiquant_group_size=32,
    )
    wide = (w + offset.repeat_interleave(32, 0)) * scale.repeat_interleave(32, 0)
    torch.testing.assert_close(y, x @ wide + residual, rtol=1e-4, atol=1e-3)
    for bad, message in (
        ({"reduce_op": "max", "antiquant_scale": scale[:1, :1]}, "only 'sum'"),
        ({"antiquant_group_size": 33, "antiquant_scale": scale}, "multiple of 32 below 64"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*given, **bad)
    with pytest.raises(ValueError, match="has no gradient"):
        run(given[0].requires_grad_(), torch.ones(K, N), *given[2:])


@pytest.mark.parametrize("function", [mm_all_reduce_int8, mm_all_reduce_int8_weights])
def test_mm_all_reduce_of_int8(function):
    run_ranks(function, 2)


def grouped_all_reduce(split_item):
    from mindspeed.ops import npu_grouped_mat_mul_all_reduce as run

    rank, size = dist.get_rank(), dist.get_world_size()
    counts, widths = [3, 1, 2], [4, 5, 6] if split_item in (0, 1) else [4, 4, 4]
    x = [shared(i, m, H * size) for i, m in enumerate(counts)]
    w = [shared(9 + i, H * size, n) for i, n in enumerate(widths)]
    bias = [shared(20 + i, n) for i, n in enumerate(widths)]
    mine = slice(rank * H, (rank + 1) * H)
    given = [one[:, mine] for one in x]
    options = {}
    if split_item in (1, 3):
        given, options = [torch.cat(given)], {"group_list": [3, 4, 6]}
    got = run(
        given,
        [one[mine] for one in w],
        dist.group.WORLD,
        bias=bias,
        split_item=split_item,
        **options,
    )
    expected = [a @ b + c for a, b, c in zip(x, w, bias)]
    if split_item in (2, 3):
        expected = [torch.cat(expected)]
    torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match="split_item=4"):
        run(given, w, None, split_item=4)
    with pytest.raises(ValueError, match="group_list=None|no group_list"):
        run(given[:1], w, None, split_item=split_item)


@pytest.mark.parametrize("split_item", [0, 1, 2, 3])
def test_grouped_mat_mul_all_reduce(split_item):
    run_ranks(grouped_all_reduce, 2, split_item)
