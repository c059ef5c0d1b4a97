"""Megatron's modules that need triton: importable without it, and computed in torch."""

import contextlib
import importlib
import importlib.util

import pytest
import torch

from mindspeed.compat import megatron
from mindspeed.compat.stand_ins import batch_invariant_kernels
from mindspeed.compat.stand_ins import inference_tensor_ops as ops
from mindspeed.compat.table import TABLE

SWITCH = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


def test_the_mode_is_off_and_asking_for_it_names_triton():
    assert not batch_invariant_kernels.is_batch_invariant_mode_enabled()
    with batch_invariant_kernels.set_batch_invariant_mode(False):
        batch_invariant_kernels.disable_batch_invariant_mode()
    with pytest.raises(RuntimeError, match="pip install triton"):
        batch_invariant_kernels.enable_batch_invariant_mode()
    with pytest.raises(RuntimeError, match="--batch-invariant-mode"):
        batch_invariant_kernels.set_batch_invariant_mode()


def test_megatron_finds_the_switch_exactly_where_it_has_one():
    switch_file = megatron.location() / "transformer/custom_layers/batch_invariant_kernels.py"
    [entry] = [each for each in TABLE if each.name == "triton_module_stand_ins"]
    with contextlib.ExitStack() as stack:
        for effect in entry.effects():
            stack.enter_context(effect.context)
        if not switch_file.is_file():
            assert importlib.util.find_spec(SWITCH) is None
        elif importlib.util.find_spec("triton") is None:
            assert importlib.import_module(SWITCH) is batch_invariant_kernels
        else:
            assert importlib.import_module(SWITCH) is not batch_invariant_kernels


def at(position):
    return torch.tensor([position])


@pytest.mark.parametrize("position", [0, 2, 5])
def test_rows_after_a_position(position):
    source, target = torch.arange(10.0).view(5, 2), torch.full((6, 2), -1.0)
    ops.tensor_get_slice_after(source, target, at(position), check_bounds=True)
    for row in range(6):
        copied = row + position < 5
        assert torch.equal(target[row], source[row + position] if copied else -torch.ones(2))
    with pytest.raises(AssertionError, match="5 rows do not fit into 3"):
        ops.tensor_get_slice_after(source, torch.empty(3, 2), at(0), check_bounds=True)
    with pytest.raises(AssertionError, match="position 6 is outside of 5 rows"):
        ops.tensor_get_slice_after(source, target, at(6))


@pytest.mark.parametrize("in_place", [True, False])
def test_one_tensor_up_to_a_position_and_another_behind_it(in_place):
    a, b = torch.arange(4.0).view(4, 1), torch.arange(10.0, 12.0).view(2, 1)
    output = None if in_place else torch.full((5, 1), -1.0)
    ops.tensor_merge(a, b, at(1), output, check_bounds=True)
    merged = a if in_place else output
    assert merged.flatten().tolist() == ([0, 10, 11, 3] if in_place else [0, 10, 11, -1, -1])
    with pytest.raises(AssertionError, match=r"rows of shape \(1,\) and \(3,\) differ"):
        ops.tensor_merge(a, torch.zeros(2, 3), at(1), check_bounds=True)


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 2)])
def test_states_at_minus_one_are_left_out(shape):
    states, new = torch.zeros(4, *shape), torch.rand(3, *shape)
    ops.tensor_masked_update(states, torch.tensor([2, -1, 0], dtype=torch.int32), new)
    assert torch.equal(states, torch.stack([new[2], states[1] * 0, new[0], states[3] * 0]))
