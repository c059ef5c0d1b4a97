"""How a backend is preferred: for one call, and without overruling the caller."""

import torch

from mindspeed.ops.fusion_attention import sdpa


def test_the_order_of_backends_is_changed_for_one_call(monkeypatch):
    seen = []
    real = sdpa.scaled_dot_product_attention

    def spy(*args, **kwargs):
        seen.append(torch._C._get_sdp_priority_order())
        return real(*args, **kwargs)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", spy)
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    before = torch._C._get_sdp_priority_order()
    plain = sdpa.attention(q, k, v, scale=0.3, is_causal=True)
    # On a cpu no shape prefers cuDNN; whether torch could run it is its own affair.
    monkeypatch.setattr(sdpa, "prefers_cudnn", lambda *tensors: True)
    preferred = sdpa.attention(q, k, v, scale=0.3, is_causal=True)
    assert torch.equal(plain, preferred)
    assert seen[0] == before == torch._C._get_sdp_priority_order()
    assert seen[1][0] == int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)
    assert sorted(seen[1]) == sorted(before)


def test_only_long_half_precision_sequences_on_cuda_prefer_cudnn():
    with torch.device("meta"):
        q, k = torch.empty(1, 4, 1024, 128), torch.empty(1, 2, 1024, 128)
    assert not sdpa.prefers_cudnn(q.bfloat16(), k.bfloat16(), k.bfloat16())
    assert not sdpa.supports_flash(q.bfloat16(), k.bfloat16(), k.bfloat16())
