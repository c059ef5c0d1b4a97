"""The two functions of flash-attn-4 that are called, in plain torch.

Tensors are (B, S, N, H), or (T, N, H) with cumulative lengths of the documents in them.
"""

from itertools import pairwise

import torch


def forward(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    return_lse,
    out,
):
    """Stand in for `_flash_attn_fwd`."""
    assert return_lse
    of_q, of_k = (cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)
    sums = []
    for rows, keys, values, result in zip(*cut(of_q, q), *cut(of_k, k, v), *cut(of_q, out)):
        weights, lse = scores(rows, keys, softmax_scale, causal)
        values = values.transpose(1, 2).repeat_interleave(q.shape[-2] // v.shape[-2], 1)
        result.copy_((weights @ values).transpose(1, 2))
        sums.append(lse.transpose(1, 2))
    return out, joined(of_q, sums).transpose(-1, -2).contiguous(), None, None, None


def backward(
    q,
    k,
    v,
    out,
    dout,
    lse,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    deterministic,
):
    """Stand in for `_flash_attn_bwd`: use what forward kept, sum over the queries of a group."""
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    of_q, of_k = (cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)
    pieces = zip(*cut(of_q, q), *cut(of_k, k, v), *cut(of_q, out, dout, lse.transpose(-1, -2)))
    grads = [gradients(*piece, softmax_scale, causal) for piece in pieces]
    return [joined(of, parts) for of, parts in zip((of_q, of_k, of_k), zip(*grads))]


def gradients(q, k, v, out, dout, lse, scale, causal):
    """Return the gradients of one batch."""
    weights, again = scores(q, k, scale, causal)
    torch.testing.assert_close(lse.transpose(1, 2), again)
    groups = q.shape[2] // k.shape[2]
    heads = [x.transpose(1, 2) for x in (q, k, v, out, dout)]
    q, k, v, out, dout = (x.repeat_interleave(q.shape[2] // x.shape[1], 1) for x in heads)
    slopes = dout @ v.transpose(-1, -2) - (out * dout).sum(-1, keepdim=True)
    slopes = weights * slopes * scale
    dk, dv = slopes.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ dout
    dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
    return [x.transpose(1, 2) for x in (slopes @ k, dk, dv)]


def scores(q, k, scale, causal):
    """Return (B, N, S, S) weights of (B, S, N, H) queries and keys, and the log of their sums.

    The last query sits at the last key.
    """
    q, k = (x.transpose(1, 2) for x in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    found = q @ k.transpose(-1, -2) * scale
    if causal:
        ahead = found.shape[-1] - found.shape[-2]
        hidden = torch.ones(found.shape[-2:]).triu(1 + ahead).bool()
        found = found.masked_fill(hidden, float("-inf"))
    return found.softmax(-1), found.logsumexp(-1)


def cut(lengths, *tensors):
    """Cut each tensor into a batch of one for each document, or leave it one batch."""
    bounds, longest = lengths
    if bounds is None:
        assert longest is None
        return [[x] for x in tensors]
    # The kernel reads 32 bits, and lays out its locks by the longest.
    assert bounds.dtype == torch.int32 and longest == bounds.diff().max()
    return [[x[None, start:end] for start, end in pairwise(bounds.tolist())] for x in tensors]


def joined(lengths, parts):
    """Undo `cut`."""
    return parts[0] if lengths[0] is None else torch.cat(parts, 1)[0]
