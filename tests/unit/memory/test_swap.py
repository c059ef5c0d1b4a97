"""Tensors that wait on the host: equal gradients with late copies, and faults that would show."""

import gc
import weakref

import pytest
import torch

from mindspeed.memory import swap
from mindspeed.memory.swap import Region, SwappedTensor
from tests.delayed_copies import delayed_swapper

LAYERS = 4


def make():
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(6, 6) / 3) for _ in range(LAYERS)]
    return weights, torch.randn(5, 6, requires_grad=True)


def forward(weights, x, swapper=None):
    """Run layers that save views, a tensor twice, and expanded ones."""
    last = None
    for weight in weights:
        last = None if swapper is None else Region(swapper, last)
        with torch.enable_grad() if last is None else last:
            hidden = x @ weight
            first, second = hidden.chunk(2, -1)
            x = torch.cat([first.sin() * second, second.exp().tanh()], -1) * hidden.t()[0, :5, None]
    return x


def gradients(swapper=None, passes=1, retain=False):
    weights, x = make()
    outs = [forward(weights, x * (1 + number), swapper) for number in range(passes)]
    with torch.no_grad():
        forward(weights, x, swapper)
    for out in outs:
        if retain:
            out.square().sum().backward(retain_graph=True)
        out.square().sum().backward()
    return [x.grad, *(weight.grad for weight in weights)]


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("retain", [False, True])
def test_late_copies_give_the_same_gradients(passes, retain):
    swapper = delayed_swapper()
    for _ in range(2):
        ours = gradients(swapper, passes, retain)
        assert all(map(torch.equal, ours, gradients(None, passes, retain)))
    assert swapper.to_host.count > 0 and swapper.to_device.count > 0


def test_host_buffers_are_used_again():
    swapper = delayed_swapper()
    gradients(swapper)
    before = swapper.buffers.total_bytes
    for _ in range(3):
        gradients(swapper)
    assert swapper.buffers.total_bytes <= 2 * before  # the last region's are free one step later
    total = swapper.buffers.total_bytes
    gradients(swapper)
    assert swapper.buffers.total_bytes == total


def test_only_the_last_region_stays_on_the_device():
    swapper = delayed_swapper()
    weights, x = make()
    died = []
    original = SwappedTensor.__init__

    def watch(self, swapper, region, x, view):
        original(self, swapper, region, x, view)
        died.append((region, weakref.ref(x)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SwappedTensor, "__init__", watch)
        out = forward(weights, x, swapper)
    regions = list(dict.fromkeys(region for region, _ in died))
    alive = {region for region, reference in died if reference() is not None}
    assert len(regions) == LAYERS and alive == {regions[-1]}
    out.sum().backward()


def test_tensors_come_back_one_region_ahead():
    swapper = delayed_swapper()
    weights, x = make()
    out = forward(weights, x, swapper)
    events = []
    start, wait = swapper.to_device.start, swapper.to_device.wait
    swapper.to_device.start = lambda *a: events.append("start") or start(*a)
    swapper.to_device.wait = lambda e: events.append("wait") or wait(e)
    out.sum().backward()
    # All copies of the region before begin before the first of them is waited for.
    first = events.index("wait")
    assert first > 1 and set(events[:first]) == {"start"}


@pytest.mark.parametrize("fault", ["leave", "arrive"])
def test_a_missing_wait_shows(fault, monkeypatch):
    """What these tests compare would differ."""

    def leave(self):
        self._here = None

    def without_wait(self):
        self.region.prefetch_previous()
        self.fetch()
        return self._here

    if fault == "leave":
        monkeypatch.setattr(SwappedTensor, "leave", leave)
    else:
        monkeypatch.setattr(SwappedTensor, "tensor", without_wait)
    assert not all(map(torch.equal, gradients(delayed_swapper()), gradients()))


def test_weights_and_small_tensors_stay():
    swapper = delayed_swapper(min_bytes=4 * 5 * 6 + 1)
    gradients(swapper)
    assert swapper.to_host.count == 0


def test_a_forward_without_backward_leaves_nothing():
    swapper = delayed_swapper()
    weights, x = make()
    gc.disable()
    try:
        forward(weights, x, swapper)
        swapper.release()
        assert sum(len(free) for free in swapper.buffers._free.values()) == swapper.to_host.count
    finally:
        gc.enable()


def test_a_region_is_recognised():
    region = Region(delayed_swapper(), None)
    assert swap.is_swap(region.pack) and not swap.is_swap(lambda x: x)
