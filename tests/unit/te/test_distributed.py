"""Recompute and random states on one rank."""

import pytest
import torch
import torch.nn.functional as F

from mindspeed.te.pytorch.distributed import (
    CudaRNGStatesTracker,
    activation_recompute_forward,
    checkpoint,
    get_all_rng_states,
)


def tracker_with(**seeds):
    tracker = CudaRNGStatesTracker()
    for name, seed in seeds.items():
        tracker.add(name, seed)
    return tracker


def draw(count=3):
    return torch.rand(count)


def test_forks_continue_their_own_sequence():
    tracker = tracker_with(a=1, b=2)
    torch.manual_seed(9)
    outside = draw(6)
    torch.manual_seed(9)
    first = draw()
    with tracker.fork("a"):
        a = [draw()]
    with tracker.fork("b"):
        b = draw()
    with tracker.fork("a"):
        a.append(draw())
    assert torch.equal(torch.cat([first, draw()]), outside)  # untouched by the forks
    torch.manual_seed(1)
    assert torch.equal(torch.cat(a), draw(6))
    torch.manual_seed(2)
    assert torch.equal(b, draw())


def test_an_error_inside_a_fork_restores_the_outer_state():
    tracker = tracker_with(a=1)
    torch.manual_seed(9)
    with pytest.raises(ZeroDivisionError), tracker.fork("a"):
        draw()
        _ = 1 / 0
    here = draw()
    torch.manual_seed(9)
    assert torch.equal(here, draw())


def test_states_can_be_taken_and_put_back():
    tracker = tracker_with(a=1)
    states = tracker.get_states()
    with tracker.fork("a"):
        first = draw()
    tracker.set_states(states)
    with tracker.fork("a"):
        assert torch.equal(first, draw())
    tracker.reset()
    assert not tracker.is_initialized() and tracker.get_states() == {}


def test_seeding_does_not_move_the_device():
    torch.manual_seed(9)
    tracker_with(a=1)
    here = draw()
    torch.manual_seed(9)
    assert torch.equal(here, draw())


def test_misuse_is_named():
    tracker = tracker_with(a=1)
    with pytest.raises(ValueError, match="random seed 1 is already in use"):
        tracker.add("b", 1)
    with pytest.raises(ValueError, match="random state 'a' already exists"):
        tracker.add("a", 2)
    with pytest.raises(KeyError, match="known: a"), tracker.fork():
        pass


def test_all_states_are_those_of_living_trackers():
    tracker = tracker_with(only_here=1)
    assert torch.equal(get_all_rng_states()["only_here"], tracker.get_states()["only_here"])
    del tracker
    assert "only_here" not in get_all_rng_states()


class Block(torch.nn.Module):
    """Draws from the default state, then from the tracker's, then from the default one again."""

    def __init__(self, tracker):
        super().__init__()
        self.tracker = tracker
        self.weight = torch.nn.Parameter(torch.randn(8, 8))
        self.grad_modes = []

    def forward(self, x, scale, skip, *, shift=0.0):
        self.grad_modes.append(torch.is_grad_enabled())
        x = F.dropout(x @ self.weight * scale, 0.3)
        with self.tracker.fork("a"):
            x = F.dropout(x, 0.3)
        return F.dropout(x.sin() + shift, 0.3), skip


def run(recompute):
    torch.manual_seed(4)
    tracker = tracker_with(a=1)
    blocks = [Block(tracker) for _ in range(2)]
    x = torch.randn(5, 8, requires_grad=True)
    scale = torch.tensor(1.5, requires_grad=True)
    out = x
    for block in blocks:
        args = (out, scale, None)
        if recompute:
            out, skip = checkpoint(block, *args, get_rng_state_tracker=lambda: tracker, shift=0.5)
        else:
            out, skip = block(*args, shift=0.5)
        assert skip is None
    out.square().sum().backward()
    after = draw(), tracker.get_states()["a"]
    return [out, x.grad, scale.grad, *(b.weight.grad for b in blocks), *after], blocks


def test_recompute_repeats_every_random_number():
    plain, _ = run(recompute=False)
    again, blocks = run(recompute=True)
    assert len(plain) == 7
    for given, true in zip(again, plain):
        assert torch.equal(given, true)
    # Megatron's router counts tokens only where gradients are on, so exactly once.
    assert [block.grad_modes for block in blocks] == [[False, True]] * 2


def test_recompute_under_autocast_computes_in_the_same_type():
    types = []

    def function(x):
        y = x @ x
        types.append(y.dtype)
        return y

    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = checkpoint(function, x)
    out.float().sum().backward()
    assert types == [torch.bfloat16] * 2


def test_activations_are_not_kept():
    kept = []
    block = Block(tracker_with(a=1))
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    )
    x = torch.randn(5, 8, requires_grad=True)
    with hooks:
        checkpoint(block, x, 2.0, None, get_rng_state_tracker=lambda: block.tracker)
    assert kept == [x.numel()]


def test_every_output_has_its_gradient():
    def function(x, y):
        return x.sin(), (x * y).cos(), x.argmax(), y.exp()

    grads = []
    for recompute in (False, True):
        torch.manual_seed(2)
        x, y = (torch.randn(6, requires_grad=True) for _ in range(2))
        first, second, place, _ = checkpoint(function, x, y) if recompute else function(x, y)
        assert place == x.argmax()
        (first.sum() + 3 * second.sum()).backward()  # nothing is asked of the last output
        grads.append([x.grad, y.grad])
    for given, true in zip(*grads):
        assert torch.equal(given, true)


def test_grad_is_refused():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"works with backward\(\)"):
        torch.autograd.grad(checkpoint(torch.sin, x).sum(), x)


def test_live_generators_are_copied():
    """Trackers made for CUDA graphs hold generators, which move on while a function runs."""

    class Live(CudaRNGStatesTracker):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator().manual_seed(3)

        def get_states(self):
            return {"a": self.generator}

        def set_states(self, states):
            self.generator = states["a"]

    tracker = Live()
    drawn = []

    def function(x):
        drawn.append(torch.rand(4, generator=tracker.generator))
        return x * drawn[-1]

    x = torch.randn(4, requires_grad=True)
    checkpoint(function, x, get_rng_state_tracker=lambda: tracker).sum().backward()
    assert torch.equal(*drawn) and torch.equal(x.grad, drawn[0])


def test_marking_a_recomputed_forward_does_nothing():
    with activation_recompute_forward(activation_recompute=True, recompute_phase=False):
        assert draw().shape == (3,)
