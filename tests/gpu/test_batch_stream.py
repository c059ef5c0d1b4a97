"""A batch that comes on a stream of its own does not wait for what the model still computes."""

import pytest
import torch

from mindspeed.compat.batch_stream import wrap_get_batch

pytestmark = pytest.mark.gpu
CYCLES = 2_000_000_000  # about a second


def get_batch(tokens):
    count = torch.tensor(0, device="cuda")  # the host waits for this copy
    return {"tokens": tokens.cuda(non_blocking=True), "count": count, "cu_seqlens": None}


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_the_host_does_not_wait_for_the_model(is_wrapped):
    tokens = torch.arange(2**20).pin_memory()
    fetch = wrap_get_batch(get_batch) if is_wrapped else get_batch
    fetch(tokens)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    queued = torch.cuda.Event()
    queued.record()
    batch = fetch(tokens)
    assert queued.query() != is_wrapped
    assert torch.equal(batch["tokens"].cpu(), tokens)
    assert batch["cu_seqlens"] is None


def test_memory_of_a_batch_waits_for_the_model():
    tokens, other = (torch.full((2**20,), value).pin_memory() for value in (1, 2))
    fetch = wrap_get_batch(get_batch)
    fetch(tokens)
    torch.cuda.synchronize()
    batch = fetch(tokens)
    torch.cuda._sleep(CYCLES)
    total = batch["tokens"].sum()
    del batch
    for _ in range(4):  # would get the same memory, and write to it before it is read
        fetch(other)
    assert total.item() == len(tokens)
