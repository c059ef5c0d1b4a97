"""Join the factors of adapters, and add the gradients of what was joined, in plain torch.

The n adapters of a layer (out, in) have factors A_i (rank, in) and B_i (out_i, rank). Those of the
layer are A (n rank, in), one A_i below the other, and B (out, n rank), whose blocks on the diagonal
are the scaled B_i: B A is the sum of what all adapters add to the weight. No gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed.ops.dispatch import refuse_gradient


class FactorLayout:
    """Where the factors of every adapter are in those of the layer.

    The projections of a layer, those without an adapter too, have their rows one behind the other.

    Args:
        rows: of each adapter, which of these are its own.
        size: rows of the layer.
        scale: of every B.
        order: which of these each row of the layer is, where they are in another order there.
        device: where the factors are.
    """

    def __init__(
        self,
        rows: Sequence[slice],
        size: int,
        scale: float,
        *,
        order: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rows = list(rows)
        self.size = size
        self.scale = float(scale)
        sources = torch.full((size, 2), -1, dtype=torch.int32)
        for number, part in enumerate(rows):
            sources[part, 0] = number
            sources[part, 1] = torch.arange(part.stop - part.start, dtype=torch.int32)
        # On the device from the start: a copy in every forward would make the host wait for it.
        self.order = None if order is None else order.to(device)
        self.back = None if order is None else order.argsort().to(device)
        """The inverse of `order`."""
        self.sources = (sources if order is None else sources[order.cpu()]).to(device)
        """(size, 2) int32: the adapter whose row each row of the layer is, and which row of it; -1
        for a row without an adapter."""

    def block(self, number: int, rank: int) -> tuple[slice, slice]:
        """Return the rows, before they are put in order, and the columns of an adapter's B."""
        return self.rows[number], slice(number * rank, (number + 1) * rank)


def join_factors(
    inner: Sequence[Tensor], outer: Sequence[Tensor], layout: FactorLayout
) -> tuple[Tensor, Tensor]:
    """Return A and B of a layer from the factors of its adapters; of one, A is a view of its A."""
    rank, count = len(inner[0]), len(inner)
    joined = outer[0].new_empty(layout.size, count * rank)
    if count > 1 or len(outer[0]) < layout.size:
        joined.zero_()
    for number, part in enumerate(outer):
        joined[layout.block(number, rank)] = part
    if layout.order is not None:
        joined = joined.index_select(0, layout.order)
    return join_inner(inner), joined.mul_(layout.scale)


def join_inner(inner: Sequence[Tensor]) -> Tensor:
    """Return A of a layer."""
    return inner[0].view_as(inner[0]) if len(inner) == 1 else torch.cat(list(inner))


def add_factor_gradients(
    inner: Tensor,
    outer: Tensor,
    inner_grads: Sequence[Tensor],
    outer_grads: Sequence[Tensor],
    layout: FactorLayout,
) -> None:
    """Add the gradients of A and B of a layer to those of the factors, in place and scaled."""
    inner_parts, outer_parts = split_gradients(inner, outer, layout)
    for total, part in zip(inner_grads, inner_parts, strict=True):
        total.add_(part)
    for total, part in zip(outer_grads, outer_parts, strict=True):
        total.add_(part, alpha=layout.scale)


def split_gradients(
    inner: Tensor, outer: Tensor, layout: FactorLayout
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the part of each adapter in the gradients of A and B of a layer, not yet scaled."""
    count = len(layout.rows)
    rank = len(inner) // count
    if layout.back is not None:
        outer = outer.index_select(0, layout.back)
    return list(inner.split(rank)), [outer[layout.block(number, rank)] for number in range(count)]


def check_join_factors(
    inner: Sequence[Tensor], outer: Sequence[Tensor], layout: FactorLayout
) -> None:
    """Raise for factors that do not fit the layout."""
    refuse_gradient("join_factors", [*inner, *outer])
    _check_factors("join_factors", inner, outer, layout)


def check_add_factor_gradients(
    inner: Tensor,
    outer: Tensor,
    inner_grads: Sequence[Tensor],
    outer_grads: Sequence[Tensor],
    layout: FactorLayout,
) -> None:
    """Raise for gradients that do not fit each other or the layout."""
    name = "add_factor_gradients"
    _check_factors(name, inner_grads, outer_grads, layout)
    rank, columns = inner_grads[0].shape
    width = rank * len(inner_grads)
    if inner.shape != (width, columns) or outer.shape != (layout.size, width):
        raise ValueError(
            f"{name} needs gradients {(width, columns)} and {(layout.size, width)} of the layer, "
            f"got {tuple(inner.shape)} and {tuple(outer.shape)}"
        )


def _check_factors(
    name: str, inner: Sequence[Tensor], outer: Sequence[Tensor], layout: FactorLayout
) -> None:
    rank = len(inner[0])
    expected = [(rows.stop - rows.start, rank) for rows in layout.rows]
    if [one.shape for one in inner] != [inner[0].shape] * len(expected) or [
        one.shape for one in outer
    ] != expected:
        raise ValueError(
            f"{name} needs A (rank, in) of one shape and B {expected}, got "
            f"{[tuple(one.shape) for one in inner]} and {[tuple(one.shape) for one in outer]}"
        )
