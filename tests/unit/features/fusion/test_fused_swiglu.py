"""What Megatron's SwiGLU function returns with and without the fused operator."""

import importlib
import inspect

import pytest
import torch

import mindspeed.megatron_adaptor  # noqa: F401  # before Megatron, as in a user's script
from mindspeed.features.activation import Activation
from mindspeed.features.fusion.fused_swiglu import FusedSwiglu
from mindspeed.features.registry import Registry

MODULE = "megatron.core.fusions.fused_bias_swiglu"


@pytest.fixture
def plain_and_fused():
    """Megatron's own function, and what stands in its place while the feature is on."""
    module = importlib.import_module(MODULE)
    plain = module.bias_swiglu_impl
    activation = Activation(Registry([FusedSwiglu()]))
    activation.activate(activation.registry.options_class(use_fused_swiglu=True))
    yield plain, module.bias_swiglu_impl
    activation.deactivate()
    assert module.bias_swiglu_impl is plain


def run(function, x, bias, **options):
    x = x.clone().requires_grad_()
    bias = None if bias is None else bias.clone().requires_grad_()
    y = function(x, bias, **options)
    y.square().sum().backward()
    return [y.detach(), x.grad, *([] if bias is None else [bias.grad])]


@pytest.mark.parametrize("shape", [(6, 42), (3, 2, 16)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_numbers(plain_and_fused, shape, with_bias, dtype):
    torch.manual_seed(0)
    x, bias = torch.randn(shape, dtype=dtype), torch.randn(shape[-1:], dtype=dtype)
    plain, fused = plain_and_fused
    assert fused is not plain
    bias = bias if with_bias else None
    exact = run(plain, x.double(), None if bias is None else bias.double())
    for found, wanted in zip(run(fused, x, bias), exact, strict=True):
        assert found.shape == wanted.shape and found.dtype == dtype
        off = (found - wanted).abs().max() / wanted.abs().max()
        assert off <= max(1e-6, torch.finfo(dtype).eps)


def test_closer_to_the_truth_than_megatron_in_bf16(plain_and_fused):
    torch.manual_seed(1)
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    plain, fused = plain_and_fused
    truth = run(plain, x.double(), None)
    for kind in (0, 1):
        errors = [(run(f, x, None)[kind] - truth[kind]).abs().mean() for f in (plain, fused)]
        assert errors[1] <= errors[0]


def test_what_the_operator_does_not_serve_goes_to_megatron(plain_and_fused):
    torch.manual_seed(2)
    x = torch.randn(4, 16)
    plain, fused = plain_and_fused
    expected = run(plain, x, None, fp8_input_store=True)
    assert all(map(torch.equal, run(fused, x, None, fp8_input_store=True), expected))
    # Keeping the input in eight bits changes the gradient, so this did not run the operator.
    assert not torch.equal(expected[1], run(plain, x, None)[1])
    if "cpu_offload_input" in inspect.signature(plain).parameters:
        expected = run(plain, x, None, cpu_offload_input=True)
        assert all(map(torch.equal, run(fused, x, None, cpu_offload_input=True), expected))


def test_the_mlp_reaches_the_operator(plain_and_fused):
    mlp = importlib.import_module("megatron.core.transformer.mlp")
    shared_experts = importlib.import_module("megatron.core.transformer.moe.shared_experts")
    assert mlp.bias_swiglu_impl is shared_experts.bias_swiglu_impl is plain_and_fused[1]
    experts = importlib.import_module("megatron.core.transformer.moe.experts")
    assert mlp.weighted_bias_swiglu_impl is experts.weighted_bias_swiglu_impl
    assert hasattr(experts.weighted_bias_swiglu_impl, "__wrapped__")
