"""Experts that cannot be one path: Megatron's, with one warning for all layers if asked for."""

from types import SimpleNamespace

from mindspeed.te.fused_experts import wrap_experts_init


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
