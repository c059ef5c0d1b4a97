"""Products fused with collectives equal their unfused composition, and so do their gradients."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.ranks import RankFailed, run_ranks

H, M, C = 8, 6, 4


def shared(seed, *shape):
    """The same numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mm_all_reduce(slices_rows, in_place, by_name):
    from mindspeed.ops import npu_mm_all_reduce_add_rms_norm, npu_mm_all_reduce_add_rms_norm_

    rank, size = dist.get_rank(), dist.get_world_size()
    x, w = shared(0, 2, slices_rows, H * size), shared(1, H * size, M)
    residual, gamma, bias = shared(2, 2, slices_rows, M), shared(3, M), shared(4, M)
    mine = slice(rank * H, (rank + 1) * H)
    hcom = dist.group.WORLD.group_name if by_name else dist.group.WORLD
    run = npu_mm_all_reduce_add_rms_norm_ if in_place else npu_mm_all_reduce_add_rms_norm
    before = residual.clone()
    y, norm = run(x[..., mine], w[mine], residual, gamma, hcom, epsilon=1e-5, bias=bias)
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


def mm_all_reduce_int8():
    from mindspeed.ops.mm_all_reduce_add_rms_norm import mm_all_reduce_add_rms_norm as run

    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(5)
    k, n = 64, 5
    x8 = torch.randint(-128, 128, (3, 2 * k), generator=draw, dtype=torch.int8)
    w8 = torch.randint(-128, 128, (2 * k, n), generator=draw, dtype=torch.int8)
    mine = slice(rank * k, (rank + 1) * k)
    residual, gamma = torch.randn(3, n, generator=draw), torch.ones(n)
    bias = torch.randint(-100, 100, (n,), generator=draw, dtype=torch.int32)
    deq = torch.rand(n, generator=draw) * 1e-3
    world = dist.group.WORLD
    y, _ = run(x8[:, mine], w8[mine], residual, gamma, world, bias=bias, dequant_scale=deq)
    whole = (x8.double() @ w8.double() + 2 * bias) * deq + residual
    torch.testing.assert_close(y.double(), whole, rtol=1e-5, atol=1e-4)

    x = torch.randn(3, 2 * k, generator=draw)
    scale, offset = (torch.rand(2 * k // 32, n, generator=draw) for _ in range(2))
    groups = slice(rank * 2, rank * 2 + 2)
    y, _ = run(
        x[:, mine],
        w8[mine],
        residual,
        gamma,
        world,
        antiquant_scale=scale[groups],
        antiquant_offset=offset[groups],
        antiquant_group_size=32,
    )
    wide = (w8 + offset.repeat_interleave(32, 0)) * scale.repeat_interleave(32, 0)
    torch.testing.assert_close(y, x @ wide + residual, rtol=1e-4, atol=1e-3)
    for bad, message in (
        ({"reduce_op": "max"}, "only 'sum'"),
        ({"antiquant_group_size": 33, "antiquant_scale": scale}, "multiple of 32 below 64"),
    ):
        with pytest.raises(ValueError, match=message):
            run(
                x[:, mine],
                w8[mine],
                residual,
                gamma,
                world,
                **({"antiquant_scale": scale[:1, :1]} | bad),
            )
    with pytest.raises(ValueError, match="has no gradient"):
        run(x[:, mine].requires_grad_(), torch.ones(k, n), residual, gamma, world)


def test_mm_all_reduce_of_int8():
    run_ranks(mm_all_reduce_int8, 2)


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


def expert_groups():
    """Four ranks: tensor ranks are neighbours, expert ranks two apart."""
    rank = dist.get_rank()
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    expert = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return expert[rank % 2], tensor[rank // 2], rank // 2, rank % 2


def experts(shard_type, activation):
    """Run both operators around each other, and compare with experts computed in one place."""
    from mindspeed.ops import npu_alltoall_allgather_bmm, npu_bmm_reducescatter_alltoall

    group_ep, group_tp, ep_rank, tp_rank = expert_groups()
    ep = tp = 2
    num_experts = 4
    # What each expert rank has for all experts; tensor ranks hold parts of it.
    tokens = shared(0, ep, num_experts, C, H).requires_grad_()
    w1 = shared(1, num_experts, H, M).requires_grad_()
    w2 = shared(2, num_experts, M, H).requires_grad_()
    b1, b2 = shared(3, num_experts, M).requires_grad_(), shared(4, num_experts, H).requires_grad_()
    act = {"None": lambda x: x, "Silu": F.silu, "GELU": F.gelu, "Relu": F.relu}[activation]

    def part(x, dim, index):
        return x.chunk(2, dim)[index]

    def own(x):
        return part(x, 0, ep_rank)

    dim = 2 if shard_type == 0 else 1
    x = part(tokens[ep_rank], dim, tp_rank)
    y1, gathered, plain = npu_alltoall_allgather_bmm(
        x,
        part(own(w1), 2, tp_rank),
        group_ep,
        ep,
        group_tp.group_name,
        tp,
        bias=part(own(b1), 1, tp_rank),
        shard_type=shard_type,
        act_type=activation,
        need_allgather_out=True,
        need_activation_feature=True,
    )
    out = npu_bmm_reducescatter_alltoall(
        y1,
        part(own(w2), 1, tp_rank),
        group_ep,
        ep,
        group_tp,
        tp,
        bias=part(own(b2), 1, tp_rank) if shard_type == 0 else own(b2),
        shard_type=shard_type,
    )

    # (E, ep * C, H): the places of all expert ranks, side by side.
    flat = tokens.transpose(0, 1).flatten(1, 2)
    hidden = torch.bmm(flat, w1) + b1.unsqueeze(1)
    whole = (torch.bmm(act(hidden), w2) + b2.unsqueeze(1)).unflatten(1, (ep, C)).transpose(0, 1)
    torch.testing.assert_close(gathered, own(flat))
    torch.testing.assert_close(plain, part(own(hidden), 2, tp_rank))
    torch.testing.assert_close(y1, part(own(act(hidden)), 2, tp_rank))
    expected = part(whole[ep_rank], dim, tp_rank)
    torch.testing.assert_close(out, expected)

    # Each rank's gradient is its share of the whole one.
    leaves = [tokens, w1, w2, b1, b2]
    cotangent = shared(7, *whole.shape)
    wanted = torch.autograd.grad((whole * cotangent).sum(), leaves, retain_graph=True)
    mine = torch.autograd.grad((out * part(cotangent[ep_rank], dim, tp_rank)).sum(), leaves)
    total = [grad.clone() for grad in mine]
    for grad in total:
        dist.all_reduce(grad)
    for got, want in zip(total, wanted):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shard_type", [0, 1])
@pytest.mark.parametrize("activation", ["None", "Silu"])
def test_experts_over_two_groups(shard_type, activation):
    run_ranks(experts, 4, shard_type, activation)


def refuse_experts():
    from mindspeed.ops import npu_alltoall_allgather_bmm as run

    x, w = torch.ones(4, C, H), torch.ones(2, H, M)
    run(x, w, None, 3, None, 3)


def test_numbers_that_are_not_those_of_the_groups_are_refused():
    with pytest.raises(RankFailed, match="ep=3 and tp=3, but the groups have 2 and 2 ranks"):
        run_ranks(refuse_experts, 2)


def coc(rows, slices, by_name):
    from mindspeed.ops.lcal_coc import coc_ops

    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    ops = coc_ops.on(world.group_name if by_name else world, slices)
    k, n = 5, 7
    whole_a, bias = shared(0, rows * size, k * size), shared(2, 1, n)
    b = shared(1, n, k * size).t()  # a transposed view
    columns = slice(rank * k, (rank + 1) * k)
    a_part, b_part = whole_a[:, columns], b[columns]
    whole = whole_a @ b + bias
    poison = torch.full((rows * size, n), torch.nan, dtype=torch.float64)
    mine = slice(rank * rows, (rank + 1) * rows)

    out = poison.clone()
    ops.matmul_all_reduce(a_part.contiguous(), b_part, out, bias)
    torch.testing.assert_close(out, whole)
    out = poison.clone()[:rows]
    ops.matmul_reduce_scatter(a_part.contiguous(), b_part, out, bias)
    torch.testing.assert_close(out, whole[mine])
    out, kept = poison.clone(), torch.full_like(whole_a, torch.nan)
    ops.all_gather_matmul(whole_a[mine], b, out, bias)
    torch.testing.assert_close(out, whole)
    out = poison.clone()
    ops.all_gather_matmul_v2(whole_a[mine], b, out, kept, bias)
    torch.testing.assert_close(out, whole)
    assert torch.equal(kept, whole_a)
    out = poison.clone()
    ops.pure_matmul(whole_a, b, out, bias)
    torch.testing.assert_close(out, whole)
    out = poison.clone()[:rows]
    ops.all_gather_matmul_reduce_scatter(a_part[mine].contiguous(), b_part, out, world, bias)
    gathered = torch.cat(
        [whole_a[r * rows : (r + 1) * rows, r * k : (r + 1) * k] for r in range(size)]
    )
    sums = sum(gathered @ b[r * k : (r + 1) * k] for r in range(size)) + bias
    torch.testing.assert_close(out, sums[mine])
    with pytest.raises(ValueError, match="coc_ops multiplies"):
        ops.pure_matmul(whole_a, b, out, bias)
    with pytest.raises(ValueError, match="do not split over"):
        ops.matmul_reduce_scatter(torch.ones(size + 1, 2), torch.ones(2, 2), torch.ones(1, 2))


@pytest.mark.parametrize("rows, slices, by_name", [(8, 4, False), (6, 4, True), (4, 1, False)])
def test_products_in_slices(rows, slices, by_name):
    run_ranks(coc, 2, rows, slices, by_name)


def order_of_calls():
    """Return what happens in which order: products and collectives."""
    from mindspeed.ops.lcal_coc import coc_ops

    events = []

    class Log(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function in (torch.mm, torch.Tensor.__matmul__, torch.Tensor.matmul):
                events.append("multiply")
            return function(*args, **(kwargs or {}))

    real = dist.all_reduce

    def all_reduce(*args, **kwargs):
        events.append("send" if kwargs["async_op"] else "wait")
        return real(*args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        with Log():
            coc_ops.matmul_all_reduce(torch.ones(8, 2), torch.ones(2, 3), torch.empty(8, 3))
    finally:
        dist.all_reduce = real
    return events


def test_a_slice_is_sent_before_the_next_is_multiplied():
    for events in run_ranks(order_of_calls, 2):
        assert events == ["multiply", "send"] * 4
