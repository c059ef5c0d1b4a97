"""The operators in place of Megatron's functions, against Megatron's own functions."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl
from megatron.core.models.common.embeddings.rope_utils import (
    _apply_rotary_pos_emb_bshd,
    _apply_rotary_pos_emb_thd,
)
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed.ops.norm.megatron import FusedRMSNorm, wrap_wrapped_torch_norm_new
from mindspeed.ops.rotary_position_embedding.megatron import wrap_apply_rotary_pos_emb
from mindspeed.ops.swiglu.megatron import wrap_bias_swiglu_impl, wrap_weighted_bias_swiglu_impl


def run(function, shape, bias):
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    bias = torch.randn(shape[-1], requires_grad=True) if bias else None
    y = function(x, bias)
    y.square().sum().backward()
    return [y, x.grad] + ([] if bias is None else [bias.grad])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6, 8), (3, 2, 8)])
def test_swiglu(shape, bias):
    ours = wrap_bias_swiglu_impl(bias_swiglu_impl)
    torch.testing.assert_close(run(ours, shape, bias), run(bias_swiglu_impl, shape, bias))
    assert inspect.signature(ours) == inspect.signature(bias_swiglu_impl)


@pytest.mark.parametrize("shape", [(6, 8), (3, 2, 8)])
def test_weighted_swiglu(shape):
    ours = wrap_weighted_bias_swiglu_impl(weighted_bias_swiglu_impl)
    results = []
    for function in (ours, weighted_bias_swiglu_impl):
        torch.manual_seed(0)
        x, weights = torch.randn(shape, requires_grad=True), torch.rand(6, 1, requires_grad=True)
        y = function(x, None, weights)
        y.square().sum().backward()
        results.append([y, x.grad, weights.grad])
    torch.testing.assert_close(*results)
    assert inspect.signature(ours) == inspect.signature(weighted_bias_swiglu_impl)
    with pytest.raises(NotImplementedError):  # Megatron's own refusal
        ours(x, torch.ones(8), weights)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((True,), {}), ((False, True), {}), ((False,), {"cpu_offload_input": True})],
)
def test_an_input_stored_elsewhere_stays_with_megatron(args, kwargs):
    calls = []

    def upstream(input, bias, fp8_input_store=False, cpu_offload_input=False):
        calls.append((fp8_input_store, cpu_offload_input))
        return input

    x = torch.randn(2, 4)
    assert wrap_bias_swiglu_impl(upstream)(x, None, *args, **kwargs) is x
    assert any(calls[0])


def config(**options):
    return TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, **options)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm(zero_centered):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 16)
    build = wrap_wrapped_torch_norm_new(WrappedTorchNorm.__new__)
    rms = config(normalization="RMSNorm", layernorm_zero_centered_gamma=zero_centered)
    plain = WrappedTorchNorm(rms, 16, eps=1e-3)
    fused = build(WrappedTorchNorm, config=rms, hidden_size=16, eps=1e-3)
    assert isinstance(fused, FusedRMSNorm)
    with torch.no_grad():
        plain.weight.copy_(torch.rand(16))
    fused.load_state_dict(plain.state_dict())
    torch.testing.assert_close(fused(x), plain(x))
    assert isinstance(build(WrappedTorchNorm, config(), 16), torch.nn.LayerNorm)


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({}, {}),
        ({}, {"mscale": 1.3}),
        ({"rotary_interleaved": True}, {}),
        ({"rotary_interleaved": True}, {"mscale": 0.7}),
        ({"multi_latent_attention": True}, {}),
    ],
)
def test_rotary_in_the_wrapped_call(options, call):
    """YaRN's scale and the order of channels in latent attention are not ignored."""
    given = config(**options)
    calls = []

    def upstream(t, freqs, config, cu_seqlens=None, mscale=1.0):
        calls.append(cu_seqlens)
        kinds = config.rotary_interleaved, config.multi_latent_attention
        return _apply_rotary_pos_emb_bshd(t, freqs, *kinds, mscale)

    torch.manual_seed(0)
    t, freqs = torch.randn(5, 2, 3, 8), torch.randn(5, 1, 1, 8)
    expected = upstream(t, freqs, given, **call)
    torch.testing.assert_close(
        wrap_apply_rotary_pos_emb(upstream)(t, freqs, given, **call), expected
    )
    is_ours = not call and not given.multi_latent_attention
    assert calls[1:] == ([] if is_ours else [call.get("cu_seqlens")])


@pytest.mark.parametrize("options", [{}, {"rotary_interleaved": True}])
def test_rotary_of_packed_documents_is_megatrons(options, monkeypatch):
    given, alone = config(**options), SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    group = {"cp_group": alone}
    if "cp_group" not in inspect.signature(_apply_rotary_pos_emb_thd).parameters:
        group = {}
        monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 1)
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: 0)
    wrapped = wrap_apply_rotary_pos_emb(lambda *_: pytest.fail("Megatron's own was called"))
    torch.manual_seed(0)
    t, freqs, bounds = torch.randn(9, 3, 8), torch.randn(5, 1, 1, 8), torch.tensor([0, 3, 8, 9])
    for borders in (bounds, bounds.int(), torch.tensor([0, 5, 9])):
        kinds = {"rotary_interleaved": given.rotary_interleaved, **group}
        expected = _apply_rotary_pos_emb_thd(t, borders, freqs, **kinds)
        for _ in range(2):  # the second time positions are known
            torch.testing.assert_close(wrapped(t, freqs, given, cu_seqlens=borders), expected)
    bounds[1] = 4  # bounds that changed are not taken for the old ones
    wrapped(t, freqs, given, cu_seqlens=bounds)
    expected = _apply_rotary_pos_emb_thd(t, bounds, freqs, **kinds)
    torch.testing.assert_close(wrapped(t, freqs, given, cu_seqlens=bounds), expected)
