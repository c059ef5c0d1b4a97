"""Experts that cannot be one path: Megatron's."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed.te.fused_experts import wrap_experts_forward


@pytest.mark.parametrize("buffers", [(), (None, None), (torch.ones(1), None)], ids=len)
def test_buffers_of_megatron_0_19_are_passed_on(buffers):
    def forward(self, x, counts, probs, output_buffer=None, grad_input_buffer=None):
        return output_buffer, grad_input_buffer

    names = ("output_buffer", "grad_input_buffer")
    experts = SimpleNamespace(linear_fc1=None, linear_fc2=None)
    wrapped, given = wrap_experts_forward(forward), (experts, torch.ones(2, 3), [2], None)
    expected = (buffers or (None, None))[:2]
    assert wrapped(*given, *buffers) == expected
    assert wrapped(*given, **dict(zip(names, buffers))) == expected
