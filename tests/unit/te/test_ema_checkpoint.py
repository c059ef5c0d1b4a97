"""The averaged model beside the model, in the two functions of Megatron-LM that write a file."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mindspeed.te.pytorch.optimizers.ema_checkpoint import (
    wrap_generate_state_dict,
    wrap_save_checkpoint,
)
from mindspeed.te.pytorch.optimizers.fused_adam import FusedAdam
from mindspeed.te.pytorch.optimizers.fused_ema_adam import FusedEmaAdam


class Chunk(torch.nn.Linear):
    def state_dict_for_save_checkpoint(self):
        return self.state_dict()


def save(chunks, kind, monkeypatch, ckpt_format):
    """Train a step and save as Megatron-LM does; return the file and the trained optimizer."""
    arguments = ModuleType("megatron.training.global_vars")
    arguments.get_args = lambda: SimpleNamespace(ckpt_format=ckpt_format)
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", arguments)
    adam = kind([p for chunk in chunks for p in chunk.parameters()], lr=0.1)
    for chunk in chunks:
        chunk(torch.ones(2)).sum().backward()
    adam.step()
    files = []

    @wrap_generate_state_dict
    def generate_state_dict(model):
        return {f"model{i}": chunk.state_dict() for i, chunk in enumerate(model)}

    @wrap_save_checkpoint
    def save_checkpoint(iteration, model, optimizer, scheduler):
        files.append(generate_state_dict(model))

    save_checkpoint(1, chunks, SimpleNamespace(optimizer=adam), None)
    assert generate_state_dict(chunks).keys() == {f"model{i}" for i in range(len(chunks))}
    return files[0], adam


@pytest.mark.parametrize("count", [1, 2])
def test_the_file_has_the_averaged_model(monkeypatch, count):
    torch.manual_seed(0)
    chunks = [Chunk(2, 3) for _ in range(count)]
    file, adam = save(chunks, FusedEmaAdam, monkeypatch, "torch")
    names = ["ema_model"] if count == 1 else ["ema_model0", "ema_model1"]
    assert file.keys() == {*names, *(f"model{i}" for i in range(count))}
    averages = adam.averages()
    for name, chunk in zip(names, chunks):
        for key, param in chunk.named_parameters():
            assert torch.equal(file[name][key], averages[param])
            assert not torch.equal(file[name][key], param)


@pytest.mark.parametrize(
    ("kind", "ckpt_format"), [(FusedAdam, "torch"), (FusedEmaAdam, "torch_dist")]
)
def test_otherwise_the_file_is_megatrons_own(monkeypatch, kind, ckpt_format):
    file, _ = save([Chunk(2, 3)], kind, monkeypatch, ckpt_format)
    assert file.keys() == {"model0"}
