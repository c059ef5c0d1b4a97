"""Documents packed in one sequence do not see each other."""

import pytest
import torch

from mindspeed.ops.packed_batch import register
from mindspeed.te.pytorch import DotProductAttention
from mindspeed.te.pytorch.attention.core import Documents
from tests.unit.te.dense_attention import H, N, S, band, check, dense


def packed(lengths, paddings, heads):
    torch.manual_seed(0)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    padded = torch.tensor([0, *(n + p for n, p in zip(lengths, paddings))]).cumsum(0).int()
    x = torch.randn(int(padded[-1]), heads, H, dtype=torch.float64, requires_grad=True)
    return x, bounds, padded


@pytest.mark.parametrize("mask_type", ["padding_causal", "padding"])
@pytest.mark.parametrize("paddings", [(0, 0, 0), (1, 0, 3)])
def test_packed_documents_do_not_see_each_other(mask_type, paddings):
    lengths = (5, 1, 4)
    q, bounds, padded = packed(lengths, paddings, N)
    k, v = (packed(lengths, paddings, 2)[0] + i for i in range(2))
    out = DotProductAttention(N, H, num_gqa_groups=2)(
        q,
        k,
        v,
        qkv_format="thd",
        attn_mask_type=mask_type,
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=5,
        max_seqlen_kv=5,
    )
    assert out.shape == (sum(lengths) + sum(paddings), N * H)
    want = torch.zeros_like(out)
    for start, n in zip(padded.tolist(), lengths):
        document = (x[start : start + n].unsqueeze(1) for x in (q, k, v))
        visible = band(n, n) if mask_type == "padding_causal" else None
        want[start : start + n] = dense(*document, visible).squeeze(1)
    check(out, want, [q, k, v])


def test_packed_without_padding_needs_no_padded_lengths():
    q, bounds, _ = packed((3, 6), (0, 0), N)
    attention = DotProductAttention(N, H, attn_mask_type="padding_causal")
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
    out = attention(q, q, q, qkv_format="thd", **lengths)
    alone = attention(*[q[3:].unsqueeze(1)] * 3, attn_mask_type="causal")
    torch.testing.assert_close(out[3:], alone.squeeze(1))


def test_cumulative_lengths_are_read_once_and_again_when_they_change():
    bounds = torch.tensor([0, 4, S])
    first = Documents.of(bounds, None)
    assert (first.starts, first.lengths) == ([0, 4], [4, S - 4])
    assert Documents.of(bounds, None).lengths == first.lengths
    bounds[1] = 2
    assert Documents.of(bounds, None).lengths == [2, S - 2]
    assert first.fill(S) and not first.fill(S + 1)
    assert not Documents.of(bounds, bounds + torch.tensor([0, 1, 1])).fill(S + 1)
    with torch.inference_mode():
        assert Documents.of(torch.tensor([0, 3]), None).lengths == [3]


def test_registered_lengths_are_not_read_from_the_device():
    bounds = torch.empty(3, dtype=torch.int32, device="meta")  # has no values to read
    register(bounds, bounds=[0, 4, S])
    assert Documents.of(bounds, None).lengths == [4, S - 4]
