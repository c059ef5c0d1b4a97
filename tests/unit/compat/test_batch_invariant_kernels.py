"""Megatron's switch for batch-invariant kernels can be imported without triton, and stays off."""

import contextlib
import importlib
import importlib.util

import pytest

from mindspeed.compat import batch_invariant_kernels, megatron
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
