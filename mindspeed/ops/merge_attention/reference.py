"""merge_attention and add_rows in plain torch, without gradient.

S rows, B batch, N heads, V head size of values; R rows that change.

merge_attention: out (S, B, N, V) is the attention of queries to some keys, lse (B, N, S) its
log-sum-exp; part (R, B, N, V) and part_lse (B, N, R) are those of the queries `rows` to other keys.
    lse[rows] = log(e^lse1 + e^lse2),    out[rows] = out1 e^(lse1 - lse) + out2 e^(lse2 - lse)
Both are updated in place, in float32 or float64. A row without keys has an lse of -inf and zeros.

add_rows: total[rows] += x, for (S, ...) and (R, ...), in the dtype of the total.

`rows` is an int64 index, each row in it once; None for all rows. Then `before` may hold, in any
dtype, what `out` or `total` is computed from, instead of itself: a first result is not copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDE = (torch.float32, torch.float64)


@torch.no_grad()
def merge_attention(
    out: Tensor,
    lse: Tensor,
    part: Tensor,
    part_lse: Tensor,
    rows: Tensor | None = None,
    before: Tensor | None = None,
) -> None:
    """Merge the attention of some queries to more keys into `out` and `lse`."""
    before, before_lse = (out if before is None else before.to(out.dtype)), lse
    if rows is not None:
        before, before_lse = out.index_select(0, rows), lse.index_select(-1, rows)
    total = torch.logaddexp(before_lse, part_lse.to(lse.dtype))
    finite = total.clamp_min(torch.finfo(lse.dtype).min)  # exp(-inf - -inf) would be NaN
    share, rest = (
        torch.exp(x - finite).permute(2, 0, 1).unsqueeze(-1) for x in (before_lse, part_lse)
    )
    merged = before * share + part * rest
    if rows is None:
        out.copy_(merged)
        lse.copy_(total)
    else:
        out.index_copy_(0, rows, merged)
        lse.index_copy_(-1, rows, total)


@torch.no_grad()
def add_rows(
    total: Tensor, x: Tensor, rows: Tensor | None = None, before: Tensor | None = None
) -> None:
    """Add `x` to some rows of `total`."""
    if before is not None:
        total.copy_(before)
    if rows is None:
        total += x
    else:
        total.index_add_(0, rows, x.to(total.dtype))


def check(
    out: Tensor,
    lse: Tensor,
    part: Tensor,
    part_lse: Tensor,
    rows: Tensor | None = None,
    before: Tensor | None = None,
) -> None:
    """Raise ValueError for tensors that do not match each other."""
    given = ", ".join(str(tuple(x.shape)) for x in (out, lse, part, part_lse))
    if out.dim() != 4 or part.dim() != 4 or out.shape[1:] != part.shape[1:]:
        raise ValueError(f"out, lse, part, part_lse of shape {given}: use (S, B, N, V) outputs")
    _check_index(len(out), len(part), rows)
    _check_before(out, rows, before)
    for x, statistic in ((out, lse), (part, part_lse)):
        if statistic.shape != (*x.shape[1:3], len(x)):
            raise ValueError(f"out, lse, part, part_lse of shape {given}: use (B, N, S) statistics")
    if out.dtype not in WIDE or out.dtype != lse.dtype:
        raise ValueError(f"out of {out.dtype}, lse of {lse.dtype}: use float32 or float64 for both")


def check_rows(
    total: Tensor, x: Tensor, rows: Tensor | None = None, before: Tensor | None = None
) -> None:
    """Raise ValueError for tensors that do not match each other."""
    if total.shape[1:] != x.shape[1:]:
        raise ValueError(f"rows of shape {tuple(x.shape)} do not match {tuple(total.shape)}")
    _check_index(len(total), len(x), rows)
    _check_before(total, rows, before)


def _check_index(num_rows: int, num_parts: int, rows: Tensor | None) -> None:
    wanted = num_rows if rows is None else len(rows)
    if num_parts != wanted or (rows is not None and rows.dtype != torch.int64):
        raise ValueError(f"{num_parts} rows were given for {wanted}: use one int64 index for each")


def _check_before(total: Tensor, rows: Tensor | None, before: Tensor | None) -> None:
    if before is not None and (rows is not None or before.shape != total.shape):
        raise ValueError(
            f"before of shape {tuple(before.shape)} for {tuple(total.shape)}: use one shape, and "
            "no index of rows"
        )
