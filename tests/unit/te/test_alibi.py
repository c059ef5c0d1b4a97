"""ALiBi: the slopes, and attention with them."""

import pytest
import torch

from mindspeed.te.pytorch import DotProductAttention
from mindspeed.te.pytorch.attention.megatron import alibi_slopes
from tests.unit.te.dense_attention import H, N, S, check, dense, make


def test_slopes_are_those_of_the_paper():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    torch.testing.assert_close(alibi_slopes(2), torch.tensor([2.0**-4, 2.0**-8]))
    # Twelve heads: those of eight, then the first four odd ones of sixteen.
    odd = [2.0 ** (-i / 2) for i in (1, 3, 5, 7)]
    torch.testing.assert_close(alibi_slopes(12), torch.tensor([2.0**-i for i in range(1, 9)] + odd))


@pytest.mark.parametrize("of_layer", [False, True])
def test_attention_equals_the_bias_written_out(of_layer):
    inputs, slopes = make(), alibi_slopes(N).double()
    attention = DotProductAttention(N, H)
    call = {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}
    if of_layer:
        attention.alibi_slopes, call = slopes, {}
    ahead = torch.arange(S) - torch.arange(S).unsqueeze(1)
    want = dense(*inputs, ahead <= 0, bias=slopes.view(-1, 1, 1) * ahead)
    check(attention(*inputs, **call), want, inputs)


def test_packed_documents_count_from_their_start():
    inputs, slopes = make(), alibi_slopes(N).double()
    attention = DotProductAttention(N, H)
    attention.alibi_slopes = slopes
    q, k, v = (x[:, 0] for x in inputs)
    bounds = torch.tensor([0, 3, S])
    out = attention(
        *(q, k, v),
        qkv_format="thd",
        attn_mask_type="padding_causal",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
    )
    for rows in (slice(0, 3), slice(3, S)):
        alone = attention(*(x[rows].unsqueeze(1) for x in (q, k, v)))
        torch.testing.assert_close(out[rows], alone[:, 0])
