"""Attention equals dense attention in float64 under every mask, bias and layout."""

import pytest
import torch

from mindspeed.te.pytorch import DotProductAttention
from tests.unit.te.dense_attention import B, H, N, S, band, check, dense, make


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("head_v", [8, 5])
def test_causal_with_grouped_queries_and_other_value_size(groups, head_v):
    inputs = make(groups=groups, head_v=head_v)
    attention = DotProductAttention(N, (H, head_v), num_gqa_groups=groups)
    out = attention(*inputs)
    assert out.shape == (S, B, N * head_v)
    check(out, dense(*inputs, band(S, S)), inputs)


def test_causal_ignores_a_mask_and_builds_none(monkeypatch):
    inputs = make()
    want = dense(*inputs, band(S, S))
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **kwargs):
        seen.append(kwargs["attn_mask"])
        return real(*args, **kwargs)

    monkeypatch.setattr("mindspeed.ops.fusion_attention.sdpa.scaled_dot_product_attention", spy)
    hide_all = torch.ones(B, 1, S, S, dtype=torch.bool)
    check(DotProductAttention(N, H)(*inputs, hide_all), want, inputs)
    assert seen == [None]


@pytest.mark.parametrize("s_k", [S, 11])
def test_no_mask_and_scale(s_k):
    inputs = make(s_k=s_k)
    attention = DotProductAttention(N, H, attn_mask_type="no_mask", softmax_scale=0.3)
    check(attention(*inputs), dense(*inputs, scale=0.3), inputs)


@pytest.mark.parametrize("s_k", [S, 11])
def test_causal_bottom_right(s_k):
    inputs = make(s_k=s_k)
    out = DotProductAttention(N, H)(*inputs, attn_mask_type="causal_bottom_right")
    check(out, dense(*inputs, band(S, s_k, s_k - S)), inputs)


@pytest.mark.parametrize("s_k", [S, 11])
def test_causal_counts_from_the_top_left(s_k):
    inputs = make(s_k=s_k)
    check(DotProductAttention(N, H)(*inputs), dense(*inputs, band(S, s_k)), inputs)


@pytest.mark.parametrize("mask_type", ["causal", "causal_bottom_right", "no_mask"])
def test_window(mask_type):
    inputs = make()
    out = DotProductAttention(N, H, attn_mask_type=mask_type, window_size=(2, 0))(*inputs)
    check(out, dense(*inputs, band(S, S, left=2)), inputs)


def test_window_on_both_sides():
    inputs = make()
    out = DotProductAttention(N, H)(*inputs, attn_mask_type="no_mask", window_size=(1, 2))
    far = torch.arange(S) - torch.arange(S).unsqueeze(1)
    check(out, dense(*inputs, (far >= -1) & (far <= 2)), inputs)


def padding(s_k):
    hidden = torch.zeros(B, 1, 1, s_k, dtype=torch.bool)
    hidden[0, ..., -2:] = True
    hidden[1, ..., 0] = True
    return hidden


@pytest.mark.parametrize("groups", [4, 2])
def test_padding(groups):
    inputs = make(groups=groups)
    out = DotProductAttention(N, H, groups, attn_mask_type="padding")(*inputs, padding(S))
    check(out, dense(*inputs, ~padding(S)), inputs)


def test_one_mask_for_all_samples():
    inputs = make()
    hidden = ~band(S, S, left=2)
    out = DotProductAttention(N, H, attn_mask_type="padding")(*inputs, hidden.unsqueeze(0))
    check(out, dense(*inputs, ~hidden), inputs)


def test_padding_of_cross_attention_is_a_pair():
    inputs = make(s_k=11)
    attention = DotProductAttention(N, H, attn_mask_type="padding", attention_type="cross")
    check(attention(*inputs, (padding(S), padding(11))), dense(*inputs, ~padding(11)), inputs)


def test_padding_and_causal_leave_blind_queries_at_zero():
    inputs = make()
    attention = DotProductAttention(N, H, attn_mask_type="padding_causal")
    out = attention(*inputs, padding(S))
    # The first query of the second sample sees only a hidden key.
    assert (out[0, 1] == 0).all()
    check(out, dense(*inputs, ~padding(S) & band(S, S)), inputs)


@pytest.mark.parametrize("per_sample", [True, False])
def test_arbitrary(per_sample):
    inputs = make(s_k=11)
    hidden = torch.rand(B if per_sample else 1, 1, S, 11) < 0.5
    hidden[..., 0] = False
    out = DotProductAttention(N, H, attn_mask_type="arbitrary")(*inputs, hidden)
    check(out, dense(*inputs, ~hidden), inputs)


@pytest.mark.parametrize("kind", ["post_scale_bias", "pre_scale_bias"])
@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
def test_bias_and_its_gradient(kind, mask_type):
    inputs = make()
    bias = torch.randn(1, N, S, S, dtype=torch.float64, requires_grad=True)
    out = DotProductAttention(N, H, attn_mask_type=mask_type)(
        *inputs, core_attention_bias_type=kind, core_attention_bias=bias
    )
    added = bias * (H**-0.5 if kind == "pre_scale_bias" else 1.0)
    visible = band(S, S) if mask_type == "causal" else None
    check(out, dense(*inputs, visible, bias=added), [*inputs, bias])


def test_batch_first_format():
    inputs = make()
    attention = DotProductAttention(N, H)
    flipped = (x.transpose(0, 1) for x in inputs)
    out = attention(*flipped, qkv_format="bshd")
    assert out.shape == (B, S, N * H)
    check(out.transpose(0, 1), dense(*inputs, band(S, S)), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype):
    inputs = make(dtype=dtype)
    out = DotProductAttention(N, H)(*inputs)
    assert out.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), dense(*inputs, band(S, S)), rtol=rtol, atol=rtol)
