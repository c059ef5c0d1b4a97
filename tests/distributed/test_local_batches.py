"""Batches that are handed on are those that Megatron's broadcasts bring."""

from typing import Any

import pytest

from tests.ranks import run_ranks

NAMES = ("tokens", "labels", "cu_seqlens")


def fetch(tensor_parallel: int) -> int:
    import torch
    from megatron.core import parallel_state

    from mindspeed.features.comm.local_batches import wrap_get_batch

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    calls = []

    def get_batch(data_iterator: Any, mtp_on_this_rank: bool = False) -> dict[str, Any]:
        """Do what Megatron-LM's function does: one rank reads, the others receive."""
        calls.append(1)
        group = parallel_state.get_tensor_model_parallel_group()
        source = parallel_state.get_tensor_model_parallel_src_rank()
        values = [next(data_iterator)] if torch.distributed.get_rank() == source else [None]
        torch.distributed.broadcast_object_list(values, source, group)
        return {name: values[0].get(name) for name in NAMES}

    batches = [{"tokens": torch.full((2, 3), n), "labels": torch.ones(2)} for n in range(4)]
    wrapped, data = wrap_get_batch(get_batch), iter(batches)
    found = [wrapped(data, mtp_on_this_rank=False) for _ in batches]
    for batch, expected in zip(found, batches):
        assert list(batch) == list(NAMES) and batch["cu_seqlens"] is None
        assert torch.equal(batch["tokens"], expected["tokens"])
        assert torch.equal(batch["labels"], expected["labels"])
    return len(calls)


@pytest.mark.parametrize(("tensor_parallel", "calls"), [(1, 1), (2, 4)])
def test_batches_are_the_same(tensor_parallel: int, calls: int) -> None:
    assert run_ranks(fetch, 2, tensor_parallel) == [calls, calls]
