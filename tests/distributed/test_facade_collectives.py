"""Collectives that Megatron asks of NCCL give the same numbers on gloo."""

import torch
import torch.distributed as dist

from tests.ranks import run_ranks

WORLD = 2


def _scaled_sums():
    rank = dist.get_rank()
    mine = torch.arange(4.0) + 10 * rank
    everywhere = mine.clone()
    dist.all_reduce(everywhere, op=dist._make_nccl_premul_sum(0.5))
    piece = torch.empty(2)
    source = mine.clone()
    dist.reduce_scatter_tensor(piece, source, op=dist._make_nccl_premul_sum(torch.tensor(0.25)))
    work = dist.all_reduce(mine, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    return everywhere, piece, source, mine


def test_a_sum_of_scaled_tensors():
    total = 2 * torch.arange(4.0) + 10
    for rank, (everywhere, piece, source, largest) in enumerate(run_ranks(_scaled_sums, WORLD)):
        assert torch.equal(everywhere, total * 0.5)
        assert torch.equal(piece, total.chunk(WORLD)[rank] * 0.25)
        assert torch.equal(source, torch.arange(4.0) + 10 * rank)  # only read
        assert torch.equal(largest, torch.arange(4.0) + 10)
