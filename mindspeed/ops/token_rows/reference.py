"""Movements between tokens and rows in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.token_rows.contract import Moves, Places, operators


def spread(tokens: Tensor, places: Places, num_rows: int) -> Tensor:
    """Copy each token to its rows."""
    return _spread(tokens.index_select(0, _safe_token(places)), places, num_rows)


def gather(rows: Tensor, places: Places, weights: Tensor | None) -> Tensor:
    """Add the rows of each token up."""
    picked = _pick(rows, places)
    if weights is not None:
        picked = picked * weights.reshape(-1, 1)
    wide = picked.dtype
    out = torch.zeros(places.num_tokens + 1, rows.shape[1], dtype=wide, device=rows.device)
    return _without_last(out.index_add_(0, _token(places), picked)).to(rows.dtype)


def gather_backward(
    grad: Tensor, rows: Tensor, places: Places, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Send each token's gradient to its rows, and to their weights."""
    copies = grad.index_select(0, _safe_token(places))
    copies = copies.to(torch.promote_types(grad.dtype, torch.float32))
    dots = (copies * _pick(rows, places)).sum(-1)
    scaled = (copies * weights.reshape(-1, 1)).to(rows.dtype)
    return _spread(scaled, places, len(rows)), dots.to(weights.dtype).reshape(weights.shape)


def _spread(copies: Tensor, places: Places, num_rows: int) -> Tensor:
    # What is dropped shares one row behind the last.
    target = places.rows.reshape(-1).long()
    target = torch.where(_token(places) < places.num_tokens, target, num_rows)
    out = copies.new_zeros(num_rows + 1, copies.shape[1])
    return _without_last(out.index_copy_(0, target.clamp(max=num_rows), copies))


def _without_last(out: Tensor) -> Tensor:
    # Not a slice: autograd forbids to change a view that such an operator returns, and Megatron
    # adds the output of shared experts in place.
    if torch.compiler.is_compiling():  # which does not trace resize_
        return out[:-1].clone()
    return out.resize_(len(out) - 1, out.shape[1])


def _pick(rows: Tensor, places: Places) -> Tensor:
    target = places.rows.reshape(-1).long()
    dropped = (target >= len(rows)) | (_token(places) >= places.num_tokens)
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    picked = padded.index_select(0, target.masked_fill(dropped, len(rows)))
    return picked.to(torch.promote_types(rows.dtype, torch.float32))


def _token(places: Places) -> Tensor:
    """Return the token of each place; places behind the last token's belong to number T."""
    number = torch.arange(places.rows.numel(), device=places.rows.device)
    if places.starts is None:
        return number // places.rows.shape[1]
    return torch.searchsorted(places.starts[1:].long().contiguous(), number, right=True)


def _safe_token(places: Places) -> Tensor:
    return _token(places).clamp_(max=places.num_tokens - 1)


spread_rows, gather_rows = operators(Moves(spread, gather, gather_backward))
