"""The largest score of each head, found one query and one key at a time."""

import math

import pytest
import torch

from mindspeed.te.pytorch import DotProductAttention

S, B, N, G, H = 5, 2, 4, 2, 8


def largest(q, k, sees):
    """Look at every pair of (S, B, N, H) queries and (S, B, G, H) keys that `sees` allows."""
    found = [-math.inf] * q.shape[2]
    for i, j, b, n in torch.cartesian_prod(*map(torch.arange, (len(q), len(k), B, N))).tolist():
        if sees(i, j, b):
            score = torch.dot(q[i, b, n], k[j, b, n // (N // G)]).item() / math.sqrt(H)
            found[n] = max(found[n], score)
    return torch.tensor(found)


def inputs():
    torch.manual_seed(0)
    return torch.randn(S, B, N, H), torch.randn(S, B, G, H), torch.randn(S, B, G, H)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_of_a_causal_batch(layout):
    q, k, v = inputs()
    attention = DotProductAttention(N, H, G, qkv_format=layout, return_max_logit=True)
    given = (q, k, v) if layout == "sbhd" else [x.transpose(0, 1) for x in (q, k, v)]
    out, logits = attention(*given)
    torch.testing.assert_close(logits, largest(q, k, lambda i, j, b: j <= i))
    assert torch.equal(out, DotProductAttention(N, H, G, qkv_format=layout)(*given))


def test_hidden_keys_do_not_count():
    q, k, v = inputs()
    hidden = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    hidden[1, ..., 3:] = True
    attention = DotProductAttention(N, H, G, attn_mask_type="padding", return_max_logit=True)
    _, logits = attention(q, k, v, hidden)
    expected = largest(q, k, lambda i, j, b: not hidden[b, 0, 0, j])
    torch.testing.assert_close(logits, expected)


def test_of_packed_documents():
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in inputs())
    bounds = torch.tensor([0, S, 2 * S], dtype=torch.int32)
    attention = DotProductAttention(
        N, H, G, qkv_format="thd", attn_mask_type="padding_causal", return_max_logit=True
    )
    _, logits = attention(q, k, v, cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    batch = [x.unflatten(0, (B, S)).transpose(0, 1) for x in (q, k)]
    torch.testing.assert_close(logits, largest(*batch, lambda i, j, b: j <= i))
