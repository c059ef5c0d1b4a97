"""The GEMMs of SwiGLU experts made of other operators, and the contract of faster ones.

T tokens, H hidden, E experts, R rows: one for each pair of token and expert, sorted by expert. F
columns of an expert; `first` (E, 2F, H) is [gate; up] of each, `second` (E, H, F). The layout of a
pre-activation and its gradient, R * 2F numbers, is up to the implementation. Nothing here waits
for the device, except on a cpu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mindspeed.ops.gmm import gmm
from mindspeed.ops.groupmatmul_add_fp32 import groupmatmul_add_fp32
from mindspeed.ops.routing_rows import routing_rows
from mindspeed.ops.swiglu import swiglu, weighted_swiglu_gradient
from mindspeed.ops.token_rows import gather_rows, spread_rows


class ExpertRows(NamedTuple):
    """Which rows belong to which token and expert, all int32 and on the device."""

    tokens: Tensor | None
    """(R,) the token of each row; None: what is multiplied are rows already, (R, H)"""
    row_ids: Tensor
    """(R,) the rows in the order of their tokens"""
    starts: Tensor
    """(T + 1,) the first index of each token in that order"""
    cu_seqlens: Tensor
    """(E + 1,) the first row of each expert, and R"""

    @property
    def ends(self) -> Tensor:
        """The end of each expert's rows."""
        return self.cu_seqlens[1:]

    def spread(self, x: Tensor) -> tuple[Tensor, ExpertRows]:
        """Copy tokens x (T, H) to their rows: return these (R, H), and self for them."""
        if self.tokens is None:
            return x, self
        rows: Tensor = spread_rows(x, self.row_ids, len(self.row_ids), self.starts)
        return rows, self._replace(tokens=None)

    def add_up(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Add the rows (R, H) of each token up, each times its weight (R,): (T, H)."""
        weights = None if weights is None else weights.index_select(0, self.row_ids)
        total: Tensor = gather_rows(rows, self.row_ids, weights, self.starts)
        return total


def number_rows(routing_map: Tensor, num_rows: int | None) -> tuple[ExpertRows, Tensor]:
    """Return the rows of a mask (T, E) with `num_rows` pairs, and the pair t * E + e of each.

    Without `num_rows`, synchronise with the device and count.
    """
    numbered, cu_seqlens = routing_rows(routing_map, num_rows)
    tokens = numbered.pair_of_row.div(routing_map.shape[1], rounding_mode="floor")
    rows = ExpertRows(tokens, numbered.rows, numbered.starts, cu_seqlens)
    return rows, numbered.pair_of_row


def sorted_rows(counts: Tensor, num_rows: int) -> ExpertRows:
    """Return the numbers of rows that are sorted by expert already, each a token of its own.

    Args:
        counts: (E,) rows of each expert, on the device.
        num_rows: all of them; given, so that the device need not be waited for.
    """
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device=counts.device)
    cu_seqlens = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    return ExpertRows(None, starts[:num_rows], starts, cu_seqlens)


class Kernels(Protocol):
    """What the experts and their gradients consist of.

    Tokens (T, H), or gradients of theirs, are multiplied as the rows (R, H) that `rows` names.
    """

    def laid_out(self, x: Tensor, rows: ExpertRows, columns: int) -> tuple[Tensor, ExpertRows]:
        """Return tokens x as GEMMs of so many columns in all read them the fastest, and rows.

        They are copied to their rows for that, or stay as they are.
        """

    def gated(self, x: Tensor, first: Tensor, rows: ExpertRows) -> tuple[Tensor, Tensor]:
        """Return the pre-activation of the gathered tokens x (T, H), and SwiGLU of it (R, F)."""

    def project(self, y: Tensor, second: Tensor, rows: ExpertRows) -> Tensor:
        """Multiply y (R, F) by the experts' second matrices: (R, H)."""

    def gated_gradient(
        self, grad: Tensor, second: Tensor, preact: Tensor, weights: Tensor, rows: ExpertRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of preact, SwiGLU of it times weights (R, F), and that of weights.

        `grad` (T, H) is the gradient of the sum of weights (R,) times `project` of SwiGLU.
        """

    def input_gradient(self, grad_preact: Tensor, first: Tensor, rows: ExpertRows) -> Tensor:
        """Multiply the gradient of the pre-activation by the experts' first matrices: (R, H)."""

    def first_gradient(
        self, grad_preact: Tensor, x: Tensor, rows: ExpertRows, totals: Sequence[Tensor] | None
    ) -> Tensor | None:
        """Return the gradient of `first`, or add it to E float32 matrices (2F, H)."""

    def second_gradient(
        self, grad: Tensor, weighted: Tensor, rows: ExpertRows, totals: Sequence[Tensor] | None
    ) -> Tensor | None:
        """Return the gradient of `second`, or add it to E float32 matrices (H, F).

        `grad` (T, H) is that of the output, `weighted` what `gated_gradient` returns.
        """


class Reference:
    """Gathered rows, grouped GEMMs and SwiGLU, one after the other; a pre-activation is (R, 2F)."""

    def laid_out(self, x: Tensor, rows: ExpertRows, columns: int) -> tuple[Tensor, ExpertRows]:
        """Copy: these GEMMs cannot gather."""
        return rows.spread(x)

    def gated(self, x: Tensor, first: Tensor, rows: ExpertRows) -> tuple[Tensor, Tensor]:
        """Gather, multiply, activate."""
        preact = gmm(rows.spread(x)[0], first.transpose(1, 2), group_list=rows.ends)
        return preact, swiglu(preact)

    def project(self, y: Tensor, second: Tensor, rows: ExpertRows) -> Tensor:
        """Multiply."""
        out: Tensor = gmm(y, second.transpose(1, 2), group_list=rows.ends)
        return out

    def gated_gradient(
        self, grad: Tensor, second: Tensor, preact: Tensor, weights: Tensor, rows: ExpertRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gather, multiply, and recompute SwiGLU with its gradient."""
        grad_y = gmm(rows.spread(grad)[0], second, group_list=rows.ends)
        weights = weights.unsqueeze(1)
        grad_preact, weighted, grad_weights = weighted_swiglu_gradient(grad_y, preact, weights)
        return grad_preact, weighted, grad_weights.squeeze(1)

    def input_gradient(self, grad_preact: Tensor, first: Tensor, rows: ExpertRows) -> Tensor:
        """Multiply."""
        grad_rows: Tensor = gmm(grad_preact, first, group_list=rows.ends)
        return grad_rows

    def first_gradient(
        self, grad_preact: Tensor, x: Tensor, rows: ExpertRows, totals: Sequence[Tensor] | None
    ) -> Tensor | None:
        """Gather once more: the rows were not kept."""
        return _outer(grad_preact, rows.spread(x)[0], rows, totals)

    def second_gradient(
        self, grad: Tensor, weighted: Tensor, rows: ExpertRows, totals: Sequence[Tensor] | None
    ) -> Tensor | None:
        """Multiply."""
        return _outer(rows.spread(grad)[0], weighted, rows, totals)


def _outer(
    left: Tensor, right: Tensor, rows: ExpertRows, totals: Sequence[Tensor] | None
) -> Tensor | None:
    if totals is not None:
        groupmatmul_add_fp32(left, right, rows.ends, totals)
        return None
    stacked = gmm(left.t(), right, group_list=rows.ends, group_type=2)
    return stacked.view(len(rows.ends), left.shape[1], right.shape[1])
