"""The switch for repeatable runs, from Python and where Megatron seeds."""

import os
import sys
import types

import pytest
import torch

from mindspeed import device
from mindspeed.features.activation import Activation
from mindspeed.features.registry import Registry
from mindspeed.features.tools.deterministic import Deterministic

MODULE = "megatron.training.initialize"


@pytest.fixture
def activation(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # else nothing would be undone
    monkeypatch.delenv("PYTHONHASHSEED")
    activation = Activation(Registry([Deterministic()]))
    yield activation
    activation.deactivate()


def enable(activation):
    activation.activate(activation.registry.options_class(npu_deterministic=True))


def test_at_once_and_undone(activation, monkeypatch):
    # A variable that a device sets, whatever its libraries: kept if the user had it, else removed.
    here = device.current()
    monkeypatch.setattr(type(here), "deterministic_env", {"KEPT": "new", "REMOVED": "new"})
    monkeypatch.setenv("KEPT", "old")
    monkeypatch.delenv("REMOVED", raising=False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    enable(activation)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert (os.environ["KEPT"], os.environ["REMOVED"]) == ("new", "new")
    assert "deterministic algorithms" in str(activation.report())
    activation.deactivate()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ["KEPT"] == "old"
    assert "REMOVED" not in os.environ


@pytest.mark.parametrize("more", ["", ", pp_group=None, dp_group=None"], ids=["0.12", "0.19"])
def test_where_megatron_seeds(activation, monkeypatch, more):
    """The two signatures upstream has; the stand-in draws as Megatron's own function does."""
    module = types.ModuleType(MODULE)
    exec(
        f"import torch\ndef _set_random_seed(seed_, data_parallel_random_init=False{more}):\n"
        "    torch.manual_seed(seed_)",
        module.__dict__,
    )
    monkeypatch.setitem(sys.modules, MODULE, module)
    plain = module._set_random_seed
    enable(activation)
    draws = []
    for _ in range(2):
        module._set_random_seed(7)
        draws.append(torch.rand(3))
    assert torch.equal(*draws)
    assert os.environ["PYTHONHASHSEED"] == "7"
    activation.deactivate()
    assert module._set_random_seed is plain


def test_repeated_training_gives_equal_bits(activation):
    enable(activation)

    def train():
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Dropout(0.5))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randint(0, 16, (4, 9))).square().sum().backward()
            optimizer.step()
        return model[0].weight.detach()

    assert torch.equal(train(), train())
