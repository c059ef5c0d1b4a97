import importlib
import inspect

import pytest
import torch

from mindspeed.compat.stand_ins.apex.normalization.fused_layer_norm import (
    FusedLayerNormAffineFunction,
)

EPS = 1e-5


def reference(x, weight, bias):
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + EPS)
    return normed * weight.double() + bias.double()


def make(dtype, param_dtype=None):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 12).to(dtype)
    weight, bias = (torch.randn(12).to(param_dtype or dtype) for _ in range(2))
    return [t.requires_grad_() for t in (x, weight, bias)]


def apply(x, weight, bias):
    return FusedLayerNormAffineFunction.apply(x, weight, bias, torch.Size([12]), EPS)


@pytest.mark.parametrize(
    ("dtype", "param_dtype", "rtol"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.bfloat16, 2**-7),
        (torch.float16, torch.float32, 2**-10),
    ],
)
def test_matches_float64(dtype, param_dtype, rtol):
    inputs = make(dtype, param_dtype)
    out = apply(*inputs)
    want = reference(*inputs)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, rtol=rtol, atol=rtol)
    grad = torch.randn(out.shape).to(dtype)
    got = torch.autograd.grad(out, inputs, grad)
    expected = torch.autograd.grad(want, inputs, grad.double())
    assert [g.dtype for g in got] == [dtype, param_dtype, param_dtype]
    for one, other in zip(got, expected):
        torch.testing.assert_close(one.double(), other.double(), rtol=rtol, atol=4 * rtol)


def test_gradient():
    assert torch.autograd.gradcheck(apply, make(torch.float64))


def test_frozen_parameters_get_no_gradient():
    x, weight, bias = make(torch.float64)
    weight.requires_grad_(False)
    apply(x, weight, bias).sum().backward()
    assert weight.grad is None and x.grad is not None and bias.grad is not None


def test_megatron_leaves_out_the_memory_efficient_argument():
    arguments = inspect.getfullargspec(FusedLayerNormAffineFunction.forward).args
    assert len(arguments) == 6 and "memory_efficient" not in arguments


@pytest.mark.parametrize(
    "name", ["optimizers", "contrib", "transformer", "multi_tensor_apply", "amp"]
)
def test_nothing_else_is_there(name):
    with pytest.raises(ImportError):
        importlib.import_module(f"mindspeed.compat.stand_ins.apex.{name}")
    assert not hasattr(importlib.import_module("mindspeed.compat.stand_ins.apex"), name)
    # What Hugging Face looks for.
    assert not hasattr(
        importlib.import_module("mindspeed.compat.stand_ins.apex.normalization"), "FusedRMSNorm"
    )


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
def test_mixed_layer_norm_answers_in_the_dtype_of_its_weights(dtype, rtol):
    from mindspeed.compat.stand_ins.apex.normalization import MixedFusedLayerNorm

    torch.manual_seed(0)
    layer = MixedFusedLayerNorm(12, eps=EPS)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(3, 2, 12).to(dtype).requires_grad_()
    out = layer(x)
    want = reference(x, layer.weight, layer.bias)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), want, rtol=rtol, atol=rtol)
    out.sum().backward()
    assert x.grad.dtype == dtype and layer.weight.grad.dtype == torch.float32


def test_mixed_layer_norm_has_weights_and_several_dimensions():
    from mindspeed.compat.stand_ins.apex.normalization import MixedFusedLayerNorm

    layer = MixedFusedLayerNorm([2, 6], memory_efficient=True)
    x = torch.randn(3, 2, 6)
    want = torch.nn.functional.layer_norm(x, [2, 6], eps=EPS)
    torch.testing.assert_close(layer(x), want)
    assert list(layer.state_dict()) == ["weight", "bias"]
    with pytest.raises(RuntimeError, match="use torch.nn.LayerNorm"):
        MixedFusedLayerNorm(12, elementwise_affine=False)
