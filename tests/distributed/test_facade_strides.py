"""Every collective on strided tensors gives what it gives on contiguous ones."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.ranks import run_ranks

WORLD = 3
GAP = -7.0


def transposed(values):
    return values.t().contiguous().t()


def sliced(values):
    return torch.full((values.shape[0], 2 * values.shape[1] + 1), GAP)[:, 1::2].copy_(values)


def expanded(values):
    return values[:1].clone().expand(values.shape)


def zero_stride(values):
    return values[0, 0].clone().expand(values.shape)


def negated(values):
    return torch.complex(values, -values).conj().imag


INPUTS = (transposed, sliced, expanded, zero_stride, negated)
OUTPUTS = (transposed, sliced, negated)


def values(rows=6, seed=0):
    """A matrix of six rows by four that differs from rank to rank."""
    return torch.arange(rows * 4.0).view(rows, 4) + 100 * dist.get_rank() + 1000 * seed + 1


def chunks(tensor):
    return list(tensor.chunk(WORLD))


def finish(work):
    work.wait()


def in_place(collective):
    def case(give, take):
        tensor = take(values())
        collective(tensor)
        return [tensor]

    return case


def in_place_list(collective):
    def case(give, take):
        tensors = [take(values()), take(values(seed=1))]
        collective(tensors)
        return tensors

    return case


def into_whole(collective, rows=6 * WORLD):
    def case(give, take):
        output = take(torch.zeros(rows, 4))
        collective(output, give(values()))
        return [output]

    return case


def into_list(collective):
    def case(give, take):
        outputs = [take(torch.zeros(6, 4)) for _ in range(WORLD)]
        collective(outputs, give(values()))
        return outputs

    return case


def from_list(collective):
    def case(give, take):
        output = take(torch.zeros(6, 4))
        collective(output, [give(values(seed=piece)) for piece in range(WORLD)])
        return [output]

    return case


def list_to_list(collective):
    def case(give, take):
        outputs = [take(torch.zeros(6, 4)) for _ in range(WORLD)]
        collective(outputs, [give(values(seed=piece)) for piece in range(WORLD)])
        return outputs

    return case


def returned(collective):
    def case(give, take):
        made = collective(give(values()))
        return [each.clone() for each in (made if isinstance(made, list) else [made])]

    return case


def reduce_to(destination):
    def case(give, take):
        tensor = (take if dist.get_rank() == destination else give)(values())
        before = tensor.clone()
        dist.reduce(tensor, destination)
        assert dist.get_rank() == destination or torch.equal(tensor, before)
        return [tensor]

    return case


def broadcast_from(source, **group):
    def case(give, take):
        tensor = (give if dist.get_rank() == source else take)(values())
        dist.broadcast(tensor, **(group or {"src": source}))
        return [tensor]

    return case


def gather_at_1(**options):
    def case(give, take):
        outputs = [take(torch.zeros(6, 4)) for _ in range(WORLD)]
        work = dist.gather(give(values()), outputs if dist.get_rank() == 1 else None, **options)
        if work is not None:
            work.wait()
        return outputs

    return case


def scatter_from_1(**options):
    def case(give, take):
        output = take(torch.zeros(6, 4))
        pieces = [give(values(seed=piece)) for piece in range(WORLD)]
        work = dist.scatter(output, pieces if dist.get_rank() == 1 else None, **options)
        if work is not None:
            work.wait()
        return [output]

    return case


def scatter_columns(give, take):
    """What megatron-bridge does to load a weight at tensor parallel size 3."""
    whole = give(torch.arange(24.0).view(2, 12))
    output = take(torch.zeros(2, 4))
    dist.scatter(output, list(whole.chunk(3, dim=1)) if dist.get_rank() == 0 else None, src=0)
    return [output]


def ring(send, receive):
    """Send to the next rank and receive from the one before; even ranks send first."""

    def case(give, take):
        rank, output = dist.get_rank(), take(torch.zeros(6, 4))
        after, before = (rank + 1) % WORLD, (rank - 1) % WORLD
        pending = [send(give(values()), after)] if rank == 0 else []
        pending.append(receive(output, before))
        if rank != 0:
            pending.append(send(give(values()), after))
        for work in pending:
            if hasattr(work, "wait"):
                work.wait()
        return [output]

    return case


def batched(give, take):
    rank, output = dist.get_rank(), take(torch.zeros(6, 4))
    operations = [
        dist.P2POp(dist.isend, give(values()), (rank + 1) % WORLD),
        dist.P2POp(dist.irecv, output, (rank - 1) % WORLD),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [output]


def coalesced(asynchronous):
    def case(give, take):
        tensors = [take(values()), take(values(seed=1))]
        with _coalescing_manager(async_ops=asynchronous) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if asynchronous:
            manager.wait()
        return tensors

    return case


def coalesced_gather(give, take):
    outputs = [take(torch.zeros(6 * WORLD, 4)) for _ in range(2)]
    with _coalescing_manager():
        for seed, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, give(values(seed=seed)))
    return outputs


def coalesced_scatter(give, take):
    outputs = [take(torch.zeros(2, 4)) for _ in range(2)]
    with _coalescing_manager():
        for seed, output in enumerate(outputs):
            dist.reduce_scatter_tensor(output, give(values(seed=seed)))
    return outputs


def in_a_group(give, take):
    """Ranks 2 and 1, the last of which is the source, by its rank in the group."""
    group = dist.new_group([1, 2])
    tensor = take(values())
    if dist.get_rank() == 0:
        return [tensor]
    dist.all_reduce(tensor, group=group)
    source = give(values()) if dist.get_rank() == 2 else take(values())
    dist.broadcast(source, group=group, group_src=1)
    total = take(values()) if dist.get_rank() == 1 else give(values())
    dist.reduce(total, group=group, group_dst=0)
    output, pieces = take(torch.zeros(6, 4)), [give(values()), give(values(seed=1))]
    dist.scatter(output, pieces if dist.get_rank() == 2 else None, group=group, group_src=1)
    whole = [take(torch.zeros(6, 4)) for _ in range(2)]
    at_root = whole if dist.get_rank() == 1 else None
    dist.gather(give(values()), at_root, group=group, group_dst=0)
    if dist.get_rank() == 1:
        dist.send(give(values()), group=group, group_dst=1)
    else:
        dist.recv(whole[0], group=group, group_src=0)
    return [tensor, source, total, output, *whole]


def by_completion(give, take):
    """The results are there once the work says that it is complete, and are written once."""
    tensor = take(values())
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    work.synchronize()
    assert work.is_success() and isinstance(work, dist.Work)
    seen = tensor.clone()
    tensor.zero_()
    work.wait()
    return [seen, tensor]


def by_future(give, take):
    tensor = take(values())
    work = dist.all_reduce(tensor, async_op=True)
    (value,) = work.get_future().then(lambda future: [each + 1 for each in future.value()]).wait()
    work.wait()
    assert [each.data_ptr() for each in work.result()] == [tensor.data_ptr()]
    return [value, tensor]


def of_methods(give, take):
    """The methods of a group and of its backend, with and without names."""
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    tensors = [take(values(seed=seed)) for seed in range(4)]
    group.allreduce(tensors[0]).wait()
    group.allreduce(tensors=[tensors[1]]).wait()
    backend.allreduce([tensors[2]]).wait()
    group.broadcast(tensors[3], root=0).wait()
    gathered = [take(torch.zeros(6 * WORLD, 4)) for _ in range(2)]
    backend._allgather_base(gathered[0], give(values())).wait()
    group._allgather_base(output=gathered[1], input=give(values())).wait()
    reduced = take(torch.zeros(2, 4))
    group._reduce_scatter_base(outputTensor=reduced, inputTensor=give(values())).wait()
    return [*tensors, *gathered, reduced]


def of_a_weight(give, take):
    """Of a parameter, and of what was made in inference mode, outside of it."""
    weight = torch.nn.Parameter(take(values()))
    dist.all_reduce(weight)
    with torch.inference_mode():
        made = take(values())
    dist.all_reduce(made)
    return [weight.detach(), made]


def without_elements(give, take):
    output = take(torch.zeros(0, 4))
    dist.all_reduce(output)
    dist.all_gather([take(torch.zeros(0, 4)) for _ in range(WORLD)], torch.zeros(0, 4).t().t())
    return [output]


EVEN = [2] * WORLD
F = functional
CASES = {
    "all_reduce": in_place(dist.all_reduce),
    "all_reduce max": in_place(lambda t: dist.all_reduce(t, dist.ReduceOp.MAX)),
    "all_reduce async": in_place(lambda t: finish(dist.all_reduce(t, async_op=True))),
    "all_reduce_coalesced": in_place_list(dist.all_reduce_coalesced),
    "broadcast 0": broadcast_from(0),
    "broadcast 2": broadcast_from(2),
    "broadcast group_src": broadcast_from(2, group_src=2),
    "reduce 0": reduce_to(0),
    "reduce 2": reduce_to(2),
    "all_gather": into_list(dist.all_gather),
    "all_gather async": into_list(lambda o, i: finish(dist.all_gather(o, i, async_op=True))),
    "all_gather_coalesced": into_list(
        lambda o, i: dist.all_gather_coalesced([[each] for each in o], [i])
    ),
    "all_gather_into_tensor": into_whole(dist.all_gather_into_tensor),
    "all_gather_into_tensor flat": into_whole(
        lambda o, i: dist.all_gather_into_tensor(o, i[:, :2].reshape(3, 4)), rows=9
    ),
    "_all_gather_base async": into_whole(
        lambda o, i: finish(dist._all_gather_base(o, i, async_op=True))
    ),
    "gather": gather_at_1(dst=1),
    "gather async": gather_at_1(group_dst=1, async_op=True),
    "scatter": scatter_from_1(src=1),
    "scatter async": scatter_from_1(group_src=1, async_op=True),
    "scatter of columns": scatter_columns,
    "reduce_scatter": from_list(dist.reduce_scatter),
    "reduce_scatter async": from_list(
        lambda o, i: finish(dist.reduce_scatter(o, i, async_op=True))
    ),
    "reduce_scatter_tensor": into_whole(dist.reduce_scatter_tensor, rows=2),
    "_reduce_scatter_base": into_whole(dist._reduce_scatter_base, rows=2),
    "all_to_all": list_to_list(dist.all_to_all),
    "all_to_all async": list_to_list(lambda o, i: finish(dist.all_to_all(o, i, async_op=True))),
    "all_to_all_single": into_whole(dist.all_to_all_single, rows=6),
    "all_to_all_single split": into_whole(
        lambda o, i: finish(dist.all_to_all_single(o, i, EVEN, EVEN, async_op=True)), rows=6
    ),
    "send and recv": ring(dist.send, dist.recv),
    "recv from any": ring(dist.send, lambda tensor, source: dist.recv(tensor)),
    "isend and irecv": ring(dist.isend, dist.irecv),
    "batch_isend_irecv": batched,
    "coalescing manager": coalesced(False),
    "coalescing manager async": coalesced(True),
    "coalesced all_gather_into_tensor": coalesced_gather,
    "coalesced reduce_scatter_tensor": coalesced_scatter,
    "functional all_reduce": returned(lambda t: F.all_reduce(t, "sum", dist.group.WORLD)),
    "functional broadcast": returned(lambda t: F.broadcast(t, 1, dist.group.WORLD)),
    "functional all_gather": returned(lambda t: F.all_gather_tensor(t, 1, dist.group.WORLD)),
    "functional reduce_scatter": returned(
        lambda t: F.reduce_scatter_tensor(t, "sum", 0, dist.group.WORLD)
    ),
    "functional all_to_all": returned(
        lambda t: F.all_to_all_single(t, EVEN, EVEN, dist.group.WORLD)
    ),
    "functional coalesced": returned(
        lambda t: F.all_reduce_coalesced([t, t + 1], "sum", dist.group.WORLD)
    ),
    "group": in_a_group,
    "completion": by_completion,
    "future": by_future,
    "methods": of_methods,
    "parameter": of_a_weight,
    "no elements": without_elements,
}


def _gap_is_untouched(tensor):
    rows, columns = tensor.shape
    if tensor.stride() != (2 * columns + 1, 2):
        return True  # of another layout
    gaps = torch.as_strided(tensor, (rows, columns + 1), tensor.stride(), 0)
    return bool((gaps == GAP).all())


def _mismatches(case):
    """List the pairs of layouts that differ from the contiguous result."""
    wrong = []
    for give in INPUTS:
        for take in OUTPUTS:
            expected = case(
                lambda made, layout=give: layout(made).resolve_neg().contiguous(),
                lambda made, layout=take: layout(made).resolve_neg().contiguous(),
            )
            results = case(give, take)
            same = all(map(torch.equal, results, expected)) and len(results) == len(expected)
            untouched = take is not sliced or all(map(_gap_is_untouched, results))
            if not (same and untouched):
                wrong.append(f"{give.__name__} to {take.__name__}")
    return wrong


def _of_all_cases():
    return {name: _mismatches(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(_of_all_cases, WORLD)


@pytest.mark.parametrize("name", CASES)
def test_strides_change_no_result(ranks, name):
    assert [wrong[name] for wrong in ranks] == [[]] * WORLD


def _outputs_that_share_memory():
    shared = (expanded(values()), torch.zeros(9).unfold(0, 4, 1))
    messages = []
    for output in shared:
        for collective in (
            lambda: dist.all_reduce(output),  # noqa: B023
            lambda: dist.all_gather([output] * WORLD, values()),  # noqa: B023
            lambda: dist.irecv(output, src=0),  # noqa: B023
        ):
            with pytest.raises(ValueError, match="share memory") as error:
                collective()
            messages.append(str(error.value))
    return messages


def test_an_output_whose_elements_share_memory_is_refused():
    for messages in run_ranks(_outputs_that_share_memory, WORLD):
        assert messages[0] == (
            "allreduce was given an output of shape (6, 4) and strides (0, 1), whose elements "
            "share memory and cannot hold different results: pass a contiguous tensor"
        )
