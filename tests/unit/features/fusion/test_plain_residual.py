import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

import mindspeed.megatron_adaptor  # noqa: F401  # before Megatron, as in a user's script
from mindspeed.features.fusion.plain_residual import wrap_get_bias_dropout_add


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("prob", [0.0, 0.5])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32])
def test_equals_megatron_bit_by_bit(training, prob, has_bias, residual_dtype):
    results = []
    for get in (get_bias_dropout_add, wrap_get_bias_dropout_add(get_bias_dropout_add)):
        torch.manual_seed(5)
        x = torch.randn(4, 2, 8).bfloat16().requires_grad_()
        residual = torch.randn(4, 2, 8, dtype=residual_dtype, requires_grad=True)
        bias = torch.randn(8).bfloat16() if has_bias else None
        out = get(training, False)((x * 1, bias), residual, prob)
        out.float().square().sum().backward()
        results.append((out, x.grad, residual.grad))
    for plain, ours in zip(*results):
        assert plain.dtype == ours.dtype
        assert torch.equal(plain, ours)


def test_the_compiled_function_is_left_alone_where_nothing_is_to_fuse():
    def forbidden(*_):
        raise AssertionError

    add = wrap_get_bias_dropout_add(lambda *_: forbidden)(True, True)
    x = torch.ones(2, requires_grad=True)
    assert add((x, None), torch.ones(2), 0.0).tolist() == [2, 2]
    with pytest.raises(AssertionError):
        add((x, None), torch.ones(2), 0.1)
