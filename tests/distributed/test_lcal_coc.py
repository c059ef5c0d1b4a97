"""GEMMs in slices equal whole ones, and send a slice while the next is computed."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.same_numbers import shared
from tests.ranks import run_ranks


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
    with pytest.raises(ValueError, match="do not divide over"):
        ops.matmul_reduce_scatter(torch.ones(size + 1, 2), torch.ones(2, 2), torch.ones(1, 2))


@pytest.mark.parametrize("rows, slices, by_name", [(8, 4, False), (6, 4, True), (4, 1, False)])
def test_products_in_slices(rows, slices, by_name):
    run_ranks(coc, 2, rows, slices, by_name)


def order_of_calls():
    """Return what happens in which order: GEMMs and collectives."""
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
