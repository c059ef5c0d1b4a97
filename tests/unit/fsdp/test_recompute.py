"""Recompute gives the gradients of the plain forward for any call signature."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mindspeed.config import ConfigError
from mindspeed.fsdp.recompute import recompute


class Block(nn.Module):
    """Counts its calls; takes keywords and a tuple, returns a dict, uses dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 3), 0

    def forward(self, x, *, scale, pair):
        self.calls += 1
        y = torch.dropout(self.linear(x) * scale + pair[0] * pair[1], 0.5, True)
        return {"y": y, "none": None}


def run(how, needs):
    """Run forward and backward; return the gradients of inputs and weights, and the calls."""
    torch.manual_seed(0)
    block = Block()
    if how is not None:
        recompute(block, use_reentrant=how)
    inputs = [torch.randn(2, 3, requires_grad=needs) for _ in range(4)]
    block(inputs[0], scale=inputs[1], pair=(inputs[2], inputs[3]))["y"].square().sum().backward()
    return [t.grad for t in (*inputs, *block.parameters())], block


@pytest.mark.parametrize("needs", [True, False], ids=["trained inputs", "frozen inputs"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_those_of_the_plain_forward(reentrant, needs):
    expected, plain = run(None, needs)
    got, block = run(reentrant, needs)
    assert (plain.calls, block.calls) == (1, 2)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    assert list(block.state_dict()) == list(plain.state_dict())


@dataclass(frozen=True)
class Hidden:
    """States as models of transformers nest them; without a default, and one not in __init__."""

    states: Any
    nested: Any = None
    late: Any = field(init=False, default=3)


class Wrapped(nn.Module):
    """Takes and returns dataclasses, one inside a list of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, given):
        y = torch.tanh(self.linear(given.states))
        return Hidden(y, [Hidden(given.nested["x"] * y), "text"])


@pytest.mark.parametrize("reentrant", [True, False])
def test_tensors_in_dataclasses_get_gradients(reentrant):
    torch.manual_seed(0)
    first, second = Wrapped(), Wrapped()
    x = torch.randn(2, 3)
    found = []
    for how in (None, reentrant):
        first.zero_grad(), second.zero_grad()
        for layer in (first, second) if how is not None else ():
            recompute(layer, use_reentrant=how)
        middle = first(Hidden(x, {"x": x}))
        result = second(Hidden(middle.nested[0].states, {"x": middle.states}))
        assert (result.nested[1], result.late) == ("text", 3)
        (result.states.sum() + result.nested[0].states.sum()).backward()
        found.append([p.grad.clone() for p in (*first.parameters(), *second.parameters())])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


class Opaque(nn.Linear):
    """Returns an object."""

    def forward(self, x):
        return SimpleNamespace(states=super().forward(x))


def test_objects_that_would_lose_gradients_are_refused():
    layer = Opaque(3, 3)
    recompute(layer, use_reentrant=True)
    with pytest.raises(ConfigError, match="Opaque returns an object .Simple.*use_reentrant: false"):
        layer(torch.ones(2, 3))
    layer = Opaque(3, 3)
    recompute(layer, use_reentrant=False)
    layer(torch.ones(2, 3)).states.sum().backward()
    assert (layer.bias.grad == 2).all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_nothing_is_recomputed_without_gradients(reentrant):
    block = Block()
    recompute(block, use_reentrant=reentrant)
    x = torch.ones(2, 3)
    with torch.no_grad():
        assert not block(x, scale=x, pair=(x, x))["y"].requires_grad
    assert block.calls == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_torch_receives_all_tensors(reentrant, monkeypatch):
    """From them it infers the devices whose RNG state to save; that of the cpu is always saved."""
    shown = []
    plain = torch.utils.checkpoint._infer_device_type
    monkeypatch.setattr(
        torch.utils.checkpoint,
        "_infer_device_type",
        lambda *args: shown.extend(tree_leaves(args)) or plain(*args),
    )
    block = Block()
    recompute(block, use_reentrant=reentrant)
    inputs = [torch.randn(2, 3) for _ in range(4)]
    block(x=inputs[0], scale=inputs[1], pair=(inputs[2], inputs[3]))
    assert all(any(leaf is given for leaf in shown) for given in inputs)


def kept_bytes(how):
    """Return what four layers keep in memory for the backward pass."""
    layers = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(4))
    )
    for layer in layers if how is not None else ():
        recompute(layer, use_reentrant=how)
    weights = {p.untyped_storage().data_ptr() for p in layers.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor  # alive, so that no other gets its address
        return tensor

    x = torch.randn(32, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = layers(x).sum()
    loss.backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_activations_are_not_saved():
    """The inputs of layers stay, 32 x 8 each; what is inside them, 32 x 64 twice, does not."""
    inputs, inside = 4 * 32 * 8 * 4, 4 * 2 * 32 * 64 * 4
    assert kept_bytes(None) == inputs + inside
    assert kept_bytes(True) <= inputs + 4 * 4  # a dummy input each
    assert kept_bytes(False) <= inputs
