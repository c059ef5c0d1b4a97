"""The load of experts over ranks: counts of the routers themselves, once for a recomputed layer."""

import torch
import torch.distributed as dist

from tests.distributed import te_model
from tests.ranks import run_ranks

CAPACITY = {"moe_expert_capacity_factor": 0.5, "moe_token_dispatcher_type": "alltoall"}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def loads_of(**options):
    """Train two steps; return the loads that all ranks read and the counts of this rank."""
    from megatron.core.transformer.moe.router import TopKRouter

    from mindspeed.moe.load import LoadMonitor

    model = te_model.build("te grouped", "gated experts", ep=2, **options)
    counts = {layer: torch.zeros(4, dtype=torch.int64) for layer in (1, 2)}

    def count(router, _, out):
        if router.training:
            counts[router.layer_number] += (out[0] > 0).sum(0)

    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(count)
    monitor = LoadMonitor([model], te_model.LAYERS)
    for _ in range(2):
        te_model.step(model)
    model.eval()
    with torch.no_grad():  # an evaluation does not count
        tokens = torch.zeros(1, te_model.SEQUENCE, dtype=torch.int64)
        model(tokens, tokens, None)
    model.train()
    loads, again = (monitor.start_read(4).wait() for _ in range(2))
    assert again == []
    return loads, counts


def check():
    pairs = 2 * 2 * te_model.SEQUENCE * te_model.BATCH * dist.get_world_size()
    plain, _ = loads_of()
    recomputed, _ = loads_of(**RECOMPUTE)
    assert plain == recomputed and [load.layer for load in plain] == [1, 2]
    assert {load.num_pairs for load in plain} == {pairs}
    assert {load.drop_rate for load in plain} == {0.0}
    dropped, counts = loads_of(**CAPACITY)
    padded, _ = loads_of(**CAPACITY, moe_pad_expert_input_to_capacity=True)
    assert dropped == padded, "padding is no load"
    assert all(0.4 < load.drop_rate < 0.6 for load in dropped)
    for load in dropped:
        total = counts[load.layer]
        dist.all_reduce(total)
        assert load.counts == tuple(total.tolist())


def test_loads_are_those_of_all_ranks():
    run_ranks(check, 2)
