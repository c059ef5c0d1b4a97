"""Collectives that Megatron asks of NCCL give the same numbers on gloo."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

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


def _pieces_of_another_shape():
    rank = dist.get_rank()
    mine = (torch.arange(6.0) + 10 * rank).view(2, 3)
    gathered = torch.empty(12)
    dist.all_gather_into_tensor(gathered, mine)
    named = torch.empty(3, 4)
    dist.all_gather_into_tensor(output_tensor=named, input_tensor=mine)
    piece = torch.empty(3)
    dist.reduce_scatter_tensor(piece, mine)
    return gathered, named, piece


def test_elements_are_gathered_and_scattered_whatever_the_shapes():
    whole = torch.cat([torch.arange(6.0), torch.arange(6.0) + 10])
    total = (2 * torch.arange(6.0) + 10).chunk(WORLD)
    for rank, results in enumerate(run_ranks(_pieces_of_another_shape, WORLD)):
        gathered, named, piece = results
        assert torch.equal(gathered, whole) and torch.equal(named, whole.view(3, 4))
        assert torch.equal(piece, total[rank])


def _send_and_take_the_memory_away():
    size, store = 1 << 20, dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        received = torch.empty(size)
        store.wait(["gone on"])
        dist.irecv(received, src=0).wait()
        return received.unique()
    activation = torch.ones(size)
    work = dist.isend(activation, dst=1)
    activation.data = torch.empty(1)
    reused = [torch.full((size,), 7.0) for _ in range(4)]
    store.set("gone on", "")
    work.wait()
    return len(reused)


def test_a_tensor_on_its_way_keeps_its_memory():
    _, received = run_ranks(_send_and_take_the_memory_away, WORLD)
    assert received.tolist() == [1.0]


def _meshes():
    made = (
        dist.init_device_mesh("cuda", (WORLD,)),
        dist.DeviceMesh("cuda", list(range(WORLD))),
        dist.DeviceMesh.from_group(dist.group.WORLD, device_type="cuda"),
    )
    model = torch.nn.Linear(4, 4, bias=False).cuda()
    torch.nn.init.ones_(model.weight)
    fully_shard(model, mesh=made[-1])
    out = model(torch.ones(1, 4))
    out.sum().backward()
    gradient = model.weight.grad.full_tensor()
    return [mesh.device_type for mesh in made], out, gradient


def test_a_mesh_of_cuda_devices_shards_on_the_cpu():
    for kinds, out, gradient in run_ranks(_meshes, WORLD):
        assert kinds == ["cpu"] * 3
        assert torch.equal(out, torch.full((1, 4), 4.0))
        assert torch.equal(gradient, torch.ones(4, 4))
