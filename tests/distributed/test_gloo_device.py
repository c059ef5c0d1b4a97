"""All gloo groups of a rank share one network loop, and each still does its own work."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.ranks import run_ranks

WORLD = 2
GROUPS = 12


def _many_groups():
    def threads():
        return len(os.listdir("/proc/self/task"))

    before = threads()
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=60)) for _ in range(GROUPS)]
    dist.new_group([1])
    grown = threads() - before
    sums = []
    for number, group in enumerate(groups):
        tensor = torch.tensor([float(number + dist.get_rank())])
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.item())
    backend = groups[0]._get_backend(torch.device("cpu"))
    is_gloo = isinstance(backend, distributed_c10d.ProcessGroupGloo)
    dist.destroy_process_group(groups.pop())
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=groups[0])  # the loop outlives the group
    return grown, sums, is_gloo, backend.options._timeout, tensor.item()


def test_groups_share_a_loop_and_work_apart():
    for grown, sums, is_gloo, timeout, again in run_ranks(_many_groups, WORLD):
        # Two workers a group are torch's; a loop of its own would be a third thread.
        assert grown <= 2 * (GROUPS + 1) + 1
        assert sums == [2.0 * number + 1 for number in range(GROUPS)]
        assert is_gloo and timeout == timedelta(seconds=60) and again == WORLD
