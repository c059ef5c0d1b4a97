"""Experts that cannot be one path: Megatron's, with one warning for all layers if asked for."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed.te.fused_experts import wrap_experts_forward, wrap_experts_init


def test_experts_that_are_not_fused_are_reported_once(caplog):
    def init(self):
        self.config = SimpleNamespace(gated_linear_unit=False)

    layers = [SimpleNamespace() for _ in range(4)]
    for is_requested in (True, False):
        built = wrap_experts_init(init, is_requested)
        for layer in layers[2 * is_requested :][:2]:
            built(layer)
    assert [layer.fused_linears for layer in layers] == [None] * 4
    (line,) = caplog.messages
    assert line.startswith("--moe-fused-experts has no effect on experts of this model: ")


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
