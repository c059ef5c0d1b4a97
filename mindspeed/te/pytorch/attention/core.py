"""Dense and packed attention on torch's scaled_dot_product_attention.

B batch, S sequence, N heads, H head size, T tokens of all documents. Keys and values may have fewer
heads than queries (grouped queries), and values another head size than keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mindspeed.ops.fusion_attention import sdpa
from mindspeed.ops.packed_batch import host_bounds
from mindspeed.te.pytorch.attention.masks import MaskRule, MaskTensors, visible_keys

LONG = 1024  # tokens of a document from where one by one is faster than all at once
MAX_MASK = 2**20  # elements of a mask, which every layer keeps for backward


@dataclass(frozen=True)
class Softmax:
    """What happens between query * key and value: the scale before, the dropout after."""

    scale: float
    dropout: float


@dataclass(frozen=True)
class Documents:
    """The start and the length of each document of a packed sequence, on the host."""

    starts: list[int]
    lengths: list[int]
    bounds: Tensor
    """The cumulative lengths without padding, as given."""

    @classmethod
    def of(cls, bounds: Tensor, padded_bounds: Tensor | None) -> Documents:
        """Read cumulative lengths; where there is padding, the padded ones give the starts."""
        starts = host_bounds(bounds if padded_bounds is None else padded_bounds)[:-1]
        lengths = [end - start for start, end in pairwise(host_bounds(bounds))]
        return cls(starts, lengths, bounds)

    def fill(self, tokens: int) -> bool:
        """Return whether the documents fill `tokens`, without padding between or behind them."""
        ends = [0, *accumulate(self.lengths)]
        return ends == [*self.starts, tokens]

    def slices(self) -> list[slice]:
        """Return the token range of each document."""
        return [slice(start, start + n) for start, n in zip(self.starts, self.lengths)]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: MaskRule,
    softmax: Softmax,
    *,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend (B, N, S, H) queries to keys and values; `bias` is added to the scaled scores."""
    lengths = q.shape[-2], k.shape[-2]
    is_plain = visible is None and bias is None
    causal = is_plain and rule.is_plain_causal(*lengths)
    if is_plain and not causal and rule.is_window(*lengths) and sdpa.supports_flash(q, k, v):
        return _attend_window(q, k, v, rule, softmax)
    if is_plain and rule.is_end_of_causal(*lengths) and lengths[0] * lengths[1] > MAX_MASK:
        return _attend_end(q, k, v, softmax)
    band = None if causal else rule.visible_band(*lengths, q.device)
    if band is not None:
        visible = band if visible is None else visible & band
    blind = None
    if visible is not None:
        # A query that sees no key would compute 0 / 0: let it see all, and drop what it gets.
        blind = ~visible.any(-1, keepdim=True)
        visible = visible | blind
        bias = visible if bias is None else bias.masked_fill(~visible, float("-inf"))
    out = sdpa.attention(
        q,
        k,
        v,
        scale=softmax.scale,
        dropout=softmax.dropout,
        is_causal=causal,
        mask=bias,
    )
    return out if blind is None else out.masked_fill(blind, 0.0)


def _attend_window(q: Tensor, k: Tensor, v: Tensor, rule: MaskRule, softmax: Softmax) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return sdpa.flash_attention(
        q, k, v, scale=softmax.scale, dropout=softmax.dropout, window=rule.window
    ).transpose(1, 2)


def _attend_end(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Attend the last queries, with zeros in the place of those before them instead of a mask."""
    before = k.shape[-2] - q.shape[-2]
    whole = torch.nn.functional.pad(q, (0, 0, before, 0))
    out = sdpa.attention(
        whole, k, v, scale=softmax.scale, dropout=softmax.dropout, is_causal=True, mask=None
    )
    return out[..., before:, :]


def attend_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: MaskRule,
    softmax: Softmax,
    *,
    mask: MaskTensors = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend (S, B, N, H) tensors and return (S, B, N * H)."""
    visible = visible_keys(mask, rule.kind) if rule.reads_mask else None
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = attend(q, k, v, rule, softmax, visible=visible, bias=bias)
    return out.permute(2, 0, 1, 3).flatten(2)


def attend_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: MaskRule,
    softmax: Softmax,
    *,
    of_q: Documents,
    of_k: Documents,
) -> Tensor:
    """Attend packed (T, N, H) tensors, each document to itself only, and return (T, N * H).

    No mask over all tokens is ever built: one launch where flash attention serves, otherwise one
    document at a time. Padding gets zeros.
    """
    _check_fits(len(q), of_q, "cu_seqlens_q")
    _check_fits(len(k), of_k, "cu_seqlens_kv")
    if _is_one_launch(q, k, v, rule, of_q=of_q, of_k=of_k):
        return _attend_packed(q, k, v, rule, softmax, of_q=of_q, of_k=of_k)
    pieces, end = [], 0
    for rows, columns in zip(of_q.slices(), of_k.slices(), strict=True):
        pieces.append(v.new_zeros(rows.start - end, q.shape[1], v.shape[2]))
        one_q, one_k, one_v = (
            x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[columns], v[columns])
        )
        pieces.append(attend(one_q, one_k, one_v, rule, softmax).squeeze(0).transpose(0, 1))
        end = rows.stop
    pieces.append(v.new_zeros(q.shape[0] - end, q.shape[1], v.shape[2]))
    return torch.cat(pieces).flatten(1)


def _check_fits(tokens: int, documents: Documents, name: str) -> None:
    last = documents.slices()[-1].stop if documents.starts else 0
    if last > tokens:
        raise ValueError(f"{name} ends at {last}, after the {tokens} rows that there are")


def _is_one_launch(
    q: Tensor, k: Tensor, v: Tensor, rule: MaskRule, *, of_q: Documents, of_k: Documents
) -> bool:
    is_dense = of_q.fill(len(q)) and of_k.fill(len(k)) and min(of_k.lengths) > 0
    same = of_q.lengths == of_k.lengths or "bottom_right" in rule.kind or rule.window == (-1, -1)
    if not is_dense or not same or not sdpa.supports_flash(q, k, v):
        return False
    # Of torch's own, cuDNN takes whole documents and is the faster one where they are long.
    is_short = sum(of_q.lengths) < len(of_q.lengths) * LONG
    return is_short or sdpa.flash4.is_allowed(q, k, v, rule.window)


def _attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: MaskRule,
    softmax: Softmax,
    *,
    of_q: Documents,
    of_k: Documents,
) -> Tensor:
    q_bounds, k_bounds = (one.bounds.to(q.device, torch.int32) for one in (of_q, of_k))
    return sdpa.flash_attention(
        q,
        k,
        v,
        scale=softmax.scale,
        dropout=softmax.dropout,
        window=rule.window,
        documents=sdpa.Documents(q_bounds, k_bounds, max(of_q.lengths), max(of_k.lengths)),
    ).flatten(1)


def largest_in_batch(
    q: Tensor,
    k: Tensor,
    rule: MaskRule,
    scale: float,
    *,
    mask: MaskTensors = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the largest score of each head, (N,), for (S, B, N, H) queries and keys.

    QK-clipping keeps it below a threshold. torch's fused attention does not return it, so the
    scores are computed once more, without gradients.
    """
    visible = visible_keys(mask, rule.kind) if rule.reads_mask else None
    q, k = (x.permute(1, 2, 0, 3) for x in (q, k))
    return _largest(q, k, rule, scale, visible=visible, bias=bias)


def largest_in_documents(
    q: Tensor, k: Tensor, rule: MaskRule, scale: float, *, of_q: Documents, of_k: Documents
) -> Tensor:
    """Return `largest_in_batch` of packed (T, N, H) queries and keys, each document on its own."""
    largest = []
    for rows, columns in zip(of_q.slices(), of_k.slices(), strict=True):
        one_q, one_k = (x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[columns]))
        largest.append(_largest(one_q, one_k, rule, scale))
    return torch.stack(largest).amax(0)


@torch.no_grad()
def _largest(
    q: Tensor,
    k: Tensor,
    rule: MaskRule,
    scale: float,
    *,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias
    for allowed in (visible, rule.visible_band(q.shape[-2], k.shape[-2], q.device)):
        if allowed is not None:
            scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.amax((0, 2, 3))
