"""partial_attention and its gradient in plain torch.

B batch, S queries, T keys, N heads of queries, K of keys and values, H head size, V that of values.

scores = scale * q k^T + bias, of which query i sees key j when
    T - S - left <= j - i <= T - S + right,        window = (left, right), -1 for no limit:
the last query is aligned to the last key, as in flash attention.

out = softmax(scores) v, and lse = log(sum(exp(scores))), (B, N, S) in float32 at lowest. A query
that sees no key gets zeros and -inf. The softmax over several parts of the keys follows from their
out and lse. The gradient takes out and lse of all parts together: softmax = exp(scores - lse).

Packed documents: (tokens, N, H) tensors with `documents`, each of which attends to itself only; lse
is (N, tokens).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from mindspeed.ops.fusion_attention.flash4 import Documents

Window = tuple[int, int]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
QUERIES_AT_A_TIME = 1024  # bounds the matrix of scores


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: Window = (-1, -1),
    bias: Tensor | None = None,
    documents: Documents | None = None,
) -> None:
    """Raise ValueError for tensors that do not match each other."""
    dims = 3 if documents is not None else 4
    shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
    if any(x.dim() != dims for x in (q, k, v)):
        raise ValueError(f"q, k, v of shape {shapes}: use {dims} dimensions")
    if q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1] or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"q, k, v of shape {shapes}: queries and keys need the same head size, keys and values "
            "the same rows and heads, and their heads must divide those of the queries"
        )
    if bias is not None and documents is not None:
        raise ValueError("packed documents take no bias: attend to one at a time")
    if min(window) < -1:
        raise ValueError(f"window={window}: use numbers of keys from 0 on, -1 for all")


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: Window = (-1, -1),
    bias: Tensor | None = None,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention (B, S, N, V) of (B, S or T, heads, size) tensors, and its lse.

    `bias` is (1 or B, 1 or N, S, T).
    """
    if documents is not None:
        return _packed(q, k, v, scale, window, documents)
    outs, sums = [], []
    for rows in _chunks(q.shape[1]):
        scores = _scores(q, k, scale, window, bias, rows)
        lse = scores.logsumexp(-1)
        # Where there is no key, the scores are all -inf: subtract something finite.
        finite = lse.clamp_min(torch.finfo(lse.dtype).min)
        weights = torch.exp(scores - finite.unsqueeze(-1))
        outs.append(_weighted(weights, v))
        sums.append(lse)
    lse = torch.cat(sums, -1) if sums else q.new_zeros(len(q), q.shape[2], 0)
    out = torch.cat(outs, 1) if outs else q.new_zeros(*q.shape[:-1], v.shape[-1])
    return out.to(q.dtype), lse.to(_acc_dtype(q))


def partial_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    window: Window = (-1, -1),
    bias: Tensor | None = None,
    documents: Documents | None = None,
) -> Gradients:
    """Return the gradients of q, k, v and, with a bias, of the bias (B, N, S, T), for these keys.

    grad, out and lse belong to all keys that the queries attend to.
    """
    if documents is not None:
        options = {"scale": scale, "window": window, "documents": documents}
        return _packed_backward(grad, q, k, v, out, lse, **options)  # type: ignore[arg-type]
    dtype = _acc_dtype(q)
    dq, dbias = [], []
    dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (k, v))
    for rows in _chunks(q.shape[1]):
        finite = lse[..., rows].clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)
        weights = torch.exp(_scores(q, k, scale, window, bias, rows) - finite)
        dout = grad[:, rows].to(dtype)
        inner = (dout * out[:, rows]).sum(-1).transpose(1, 2).unsqueeze(-1)
        dscores = weights * (_products(dout, v.to(dtype)) - inner)
        dq.append(_weighted(dscores, k) * scale)
        dk += _over_queries(dscores, q[:, rows].to(dtype), k) * scale
        dv += _over_queries(weights, dout, v)
        if bias is not None:
            dbias.append(dscores)
    grad_q = torch.cat(dq, 1) if dq else torch.zeros_like(q)
    total = torch.cat(dbias, 2) if dbias else None
    return grad_q.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), total


def largest(
    q: Tensor, k: Tensor, scale: float, window: Window, bias: Tensor | None = None
) -> Tensor:
    """Return the largest score of each head, (N,), of (B, S or T, heads, size) tensors."""
    rows = [
        _scores(q, k, scale, window, bias, rows).amax((0, 2, 3)) for rows in _chunks(q.shape[1])
    ]
    return torch.stack(rows).amax(0)


def visible(num_q: int, num_k: int, window: Window, device: torch.device) -> Tensor | None:
    """Return which of the (num_q, num_k) scores the window leaves, None for all of them."""
    left, right = window
    if left < 0 and right < 0:
        return None
    query = torch.arange(num_q, device=device).unsqueeze(1) + (num_k - num_q)
    key = torch.arange(num_k, device=device)
    seen = torch.ones(num_q, num_k, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= key >= query - left
    if right >= 0:
        seen &= key <= query + right
    return seen


def _acc_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _chunks(num_q: int) -> Iterator[slice]:
    for start in range(0, num_q, QUERIES_AT_A_TIME):
        yield slice(start, min(start + QUERIES_AT_A_TIME, num_q))


def _scores(
    q: Tensor, k: Tensor, scale: float, window: Window, bias: Tensor | None, rows: slice
) -> Tensor:
    dtype = _acc_dtype(q)
    scores = _products(q[:, rows].to(dtype), k.to(dtype)) * scale
    if bias is not None:
        scores = scores + bias[..., rows, :]
    seen = visible(q.shape[1], k.shape[1], window, q.device)
    return scores if seen is None else scores.masked_fill(~seen[rows], float("-inf"))


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Return q k^T, (B, N, S, T); each key head serves the query heads of its group."""
    groups = q.unflatten(2, (k.shape[2], -1))
    return torch.einsum("bskgh,btkh->bkgst", groups, k).flatten(1, 2)


def _weighted(weights: Tensor, x: Tensor) -> Tensor:
    """Return the (B, S, N, V) sums of the keys' or values' rows with these weights."""
    groups = weights.unflatten(1, (x.shape[2], -1))
    return torch.einsum("bkgst,btkh->bskgh", groups, x.to(weights.dtype)).flatten(2, 3)


def _over_queries(weights: Tensor, x: Tensor, like: Tensor) -> Tensor:
    """Return the (B, T, K, H) sums of the queries' rows with these weights."""
    groups = weights.unflatten(1, (like.shape[2], -1))
    return torch.einsum("bkgst,bskgh->btkh", groups, x.unflatten(2, (like.shape[2], -1)))


def _slices(documents: Documents) -> Iterator[tuple[slice, slice]]:
    q_bounds, k_bounds = documents.cu_seqlens_q.tolist(), documents.cu_seqlens_k.tolist()
    for (q_start, q_end), (k_start, k_end) in zip(pairwise(q_bounds), pairwise(k_bounds)):
        yield slice(q_start, q_end), slice(k_start, k_end)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window, documents: Documents
) -> tuple[Tensor, Tensor]:
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full((q.shape[1], len(q)), float("-inf"), dtype=_acc_dtype(q))
    for rows, columns in _slices(documents):
        tensors = (x.unsqueeze(0) for x in (q[rows], k[columns], v[columns]))
        one, one_lse = partial_attention(*tensors, scale=scale, window=window)
        out[rows], lse[:, rows] = one[0], one_lse[0]
    return out, lse


def _packed_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    window: Window,
    documents: Documents,
) -> Gradients:
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for rows, columns in _slices(documents):
        tensors = (grad[rows], q[rows], k[columns], v[columns], out[rows], lse[:, rows])
        one = partial_attention_backward(
            *(x.unsqueeze(0) for x in tensors), scale=scale, window=window
        )
        for whole, part, where in zip(grads, one, (rows, columns, columns)):
            whole[where] = part[0]  # type: ignore[index]
    return grads[0], grads[1], grads[2], None
