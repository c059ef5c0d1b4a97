"""Factors of adapters on the GPU: what plain torch writes, bit for bit."""

import pytest
import torch

from mindspeed import device
from mindspeed.ops.adapter_factors import add_factor_gradients, join_factors, reference
from mindspeed.ops.adapter_factors.reference import FactorLayout

pytestmark = pytest.mark.gpu
# Rows of each projection, those with an adapter, the input's size and the rank.
LAYERS = {
    "qkv": ([1536, 256, 256], [0, 1, 2], 1536, 16),
    "q and v": ([1536, 256, 256], [0, 2], 1536, 8),
    "fc1": ([8960, 8960], [0, 1], 1536, 16),
    "fc2": ([1536], [0], 8960, 16),
    "odd": ([33, 7, 1, 130], [0, 1, 2, 3], 100, 3),
}


def make(layer, is_ordered, dtype):
    """Return A and B of every adapter, not all aligned, and their layout."""
    torch.manual_seed(0)
    sizes, adapted, columns, rank = LAYERS[layer]
    here = device.current().torch_device
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    rows = [slice(starts[number], starts[number] + sizes[number]) for number in adapted]
    order = torch.randperm(sum(sizes)) if is_ordered else None
    layout = FactorLayout(rows, sum(sizes), 0.3, order=order, device=here)

    def draw(count, columns, offset):
        values = torch.randn(count * columns + offset, device=here).to(dtype)
        return values[offset:].view(count, columns)

    inner = [draw(rank, columns, number) for number in range(len(adapted))]
    outer = [draw(sizes[n], rank, number) for number, n in enumerate(adapted)]
    return inner, outer, layout


def kernels(run):
    """Return how many kernels a function launches, once it has been called."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        device.current().synchronize()
    return sum("CUDA" in str(event.device_type) for event in profile.events())


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_joins_as_torch_in_one_launch(layer, is_ordered, dtype):
    inner, outer, layout = make(layer, is_ordered, dtype)
    found = join_factors(inner, outer, layout)
    for one, other in zip(found, reference.join_factors(inner, outer, layout), strict=True):
        assert torch.equal(one, other)
    assert kernels(lambda: join_factors(inner, outer, layout)) == 1


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("total_dtype", [torch.bfloat16, torch.float32])
def test_adds_as_torch_in_one_launch(layer, is_ordered, dtype, total_dtype):
    inner, outer, layout = make(layer, is_ordered, total_dtype)
    a, b = (torch.randn_like(x).to(dtype) for x in join_factors(inner, outer, layout))
    copies = [[part.clone() for part in parts] for parts in (inner, outer)]
    assert kernels(lambda: add_factor_gradients(a, b, inner, outer, layout)) == 1
    for _ in range(2):
        reference.add_factor_gradients(a, b, *copies, layout)
    for found, expected in zip((inner, outer), copies, strict=True):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
