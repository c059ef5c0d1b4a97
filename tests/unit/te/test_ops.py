"""The operations Megatron strings together, against the modules they replace."""

import pytest
import torch
import torch.nn.functional as F

from mindspeed.te.pytorch import LayerNorm, RMSNorm, ops

ACTIVATIONS = {
    ops.GELU: F.gelu,
    ops.ReLU: F.relu,
    ops.SiLU: F.silu,
    ops.GEGLU: lambda x: F.gelu(x[..., :4]) * x[..., 4:],
    ops.ReGLU: lambda x: F.relu(x[..., :4]) * x[..., 4:],
    ops.SwiGLU: lambda x: F.silu(x[..., :4]) * x[..., 4:],
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind):
    x = torch.randn(3, 8)
    assert torch.equal(kind(cache_quantized_input=False)(x), ACTIVATIONS[kind](x))
    with pytest.raises(ValueError, match="activation_func_fp8_input_store"):
        kind(cache_quantized_input=True)


def test_a_chain_equals_its_parts_with_shared_parameters():
    torch.manual_seed(0)
    norm, linear = LayerNorm(6), torch.nn.Linear(6, 8)
    chain = ops.Sequential()
    options = dict(device="meta", dtype=torch.float32)
    for kind, arguments, names in (
        (ops.LayerNorm, (6,), {"weight": norm.weight, "bias": norm.bias}),
        (ops.BasicLinear, (6, 8), {"weight": linear.weight}),
        (ops.Bias, (8,), {"bias": linear.bias}),
        (ops.SwiGLU, (), {}),
    ):
        operation = kind(*arguments, **(options if names else {}))
        for name, param in names.items():
            setattr(operation, name, param)
        chain.append(operation)
    x = torch.randn(5, 6, requires_grad=True)
    params = [x, *norm.parameters(), *linear.parameters()]
    out = chain(x)
    grads = torch.autograd.grad(out.square().sum(), params)
    a, b = linear(norm(x)).chunk(2, dim=-1)
    expected = F.silu(a) * b
    torch.testing.assert_close(out, expected)
    for given, true in zip(grads, torch.autograd.grad(expected.square().sum(), params)):
        torch.testing.assert_close(given, true)


def test_extra_output_comes_behind_the_result():
    norm = RMSNorm(6)
    operation = ops.RMSNorm(norm.weight.shape, eps=norm.eps, device="meta", dtype=torch.float32)
    operation.weight = norm.weight
    chain = ops.Sequential()
    chain.append(ops.MakeExtraOutput())
    chain.append(operation)
    x = torch.randn(5, 6)
    out, residual = chain(x)
    assert torch.equal(out, norm(x)) and torch.equal(residual, x)


def test_fused_gradient_and_bad_options():
    linear = ops.BasicLinear(6, 8, accumulate_into_main_grad=True)
    torch.nn.init.normal_(linear.weight)
    linear.weight.main_grad = torch.zeros(8, 6)
    x, grad = torch.randn(4, 6), torch.randn(4, 8)
    linear(x).backward(grad)
    torch.testing.assert_close(linear.weight.main_grad, grad.t() @ x)
    with pytest.raises(ValueError, match="set tp_comm_overlap=False"):
        ops.BasicLinear(6, 8, userbuffers_options={"comm_name": "fc1"})
