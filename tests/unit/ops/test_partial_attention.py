"""Attention to a part of the keys: the formula, its gradient, and parts that make the whole."""

import pytest
import torch

from mindspeed.ops.fusion_attention.flash4 import Documents
from mindspeed.ops.partial_attention import (
    partial_attention,
    partial_attention_backward,
    reference,
)

B, S, T, N, K, H, V, SCALE = 2, 5, 7, 4, 2, 6, 3, 0.4


def make(num_q=S, num_k=T, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = (B, num_q, N, H), (B, num_k, K, H), (B, num_k, K, V)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def formula(q, k, v, window, bias=None):
    """Write the attention out, with torch's own gradient."""
    k, v = (x.repeat_interleave(N // K, 2) for x in (k, v))
    scores = torch.einsum("bsnh,btnh->bnst", q, k) * SCALE
    scores = scores if bias is None else scores + bias
    at = torch.arange(q.shape[1]).unsqueeze(1) + k.shape[1] - q.shape[1]
    ahead, (left, right) = torch.arange(k.shape[1]) - at, window
    hidden = (ahead < -left) & (left >= 0) | (ahead > right) & (right >= 0)
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("bnst,btnh->bsnh", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1), (0, 0), (1, -1)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_value_and_gradients(window, has_bias, monkeypatch):
    monkeypatch.setattr(reference, "QUERIES_AT_A_TIME", 2)
    inputs = make()
    bias = torch.randn(1, N, S, T, dtype=torch.float64, requires_grad=True) if has_bias else None
    options = {"scale": SCALE, "window": window, "bias": bias}
    out, lse = partial_attention(*inputs, **options)
    want, want_lse = formula(*inputs, window, bias)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    grad = torch.randn_like(want)
    got = partial_attention_backward(grad, *inputs, out, lse, **options)
    expected = torch.autograd.grad(want, [*inputs, *([bias] if has_bias else [])], grad)
    assert (got[3] is None) != has_bias
    for one, other in zip(got, expected):
        torch.testing.assert_close(one.sum(0, keepdim=True) if one is got[3] else one, other)


def test_gradients_of_parts_add_up():
    q, k, v = make()
    want, lse = formula(q, k, v, (-1, -1))
    grad = torch.randn_like(want)
    expected = torch.autograd.grad(want, (q, k, v), grad)
    parts = [
        partial_attention_backward(grad, q, k[:, rows], v[:, rows], want, lse, scale=SCALE)
        for rows in (slice(0, 3), slice(3, T))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], expected[0])
    for number in (1, 2):
        torch.testing.assert_close(torch.cat([p[number] for p in parts], 1), expected[number])


def test_a_query_without_keys_gets_nothing():
    q, k, v = make()
    bias = torch.zeros(1, 1, S, T, dtype=torch.float64)
    bias[..., 1, :] = float("-inf")
    out, lse = partial_attention(q, k, v, scale=SCALE, bias=bias)
    assert not out[:, 1].any() and lse[..., 1].eq(float("-inf")).all()
    grads = partial_attention_backward(
        torch.ones_like(out), q, k, v, out, lse, scale=SCALE, bias=bias
    )
    assert not any(x.isnan().any() for x in grads) and not grads[0][:, 1].any()


@pytest.mark.parametrize("num_q", [0, S])
def test_no_queries_or_keys(num_q):
    q, k, v = make(num_q, 0 if num_q else T)
    out, lse = partial_attention(q, k, v, scale=SCALE)
    assert out.shape == (B, num_q, N, V) and lse.shape == (B, N, num_q) and not out.any()
    grads = partial_attention_backward(torch.ones_like(out), q, k, v, out, lse, scale=SCALE)
    assert [x.shape for x in grads[:3]] == [x.shape for x in (q, k, v)]


def test_packed_documents_attend_to_themselves():
    q, k, v = (x[0].detach() for x in make(6, 9))
    bounds = [0, 2, 6], [0, 4, 9]
    documents = Documents(*(torch.tensor(b, dtype=torch.int32) for b in bounds), 4, 5)
    options = {"scale": SCALE, "window": (-1, 0)}
    out, lse = partial_attention(q, k, v, documents=documents, **options)
    grads = partial_attention_backward(out, q, k, v, out, lse, documents=documents, **options)
    for rows, columns in ((slice(0, 2), slice(0, 4)), (slice(2, 6), slice(4, 9))):
        one = [x.unsqueeze(0) for x in (q[rows], k[columns], v[columns])]
        want, want_lse = partial_attention(*one, **options)
        torch.testing.assert_close(out[rows], want[0])
        torch.testing.assert_close(lse[:, rows], want_lse[0])
        want_grads = partial_attention_backward(want, *one, want, want_lse, **options)
        for got, expected, where in zip(grads, want_grads[:3], (rows, columns, columns)):
            torch.testing.assert_close(got[where], expected[0])


def test_half_precision_is_computed_in_float32():
    inputs = [x.detach().bfloat16() for x in make()]
    out, lse = partial_attention(*inputs, scale=SCALE)
    want, want_lse = formula(*(x.double() for x in inputs), (-1, -1))
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out, want.bfloat16())
    torch.testing.assert_close(lse, want_lse.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), "use 4 dimensions"),
        (lambda q, k, v: (q[..., :2], k, v), "the same head size"),
        (lambda q, k, v: (q[:, :, :3], k, v), "must divide those of the queries"),
    ],
)
def test_bad_tensors(change, message):
    with pytest.raises(ValueError, match=message):
        partial_attention(*change(*make()), scale=SCALE)
