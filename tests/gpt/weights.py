"""Weights by global name: the same start for every layout, and the whole model from its ranks."""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

_SPREAD = 0.2  # wide enough for attention that is far from uniform at this hidden size


@dataclass(frozen=True)
class Shard:
    """One rank's slice of a global tensor."""

    name: str
    shape: tuple[int, ...]
    place: tuple[int | slice, ...]
    values: torch.Tensor

    def start(self) -> torch.Tensor:
        """Return the values this slice starts from, which depend on the global name alone."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        values = torch.randn(self.shape, generator=generator) * _SPREAD
        centre = 1.0 if self.name.endswith(("norm_weight", "norm.weight")) else 0.0
        return (centre + values)[self.place]


def assemble(pieces: Iterable[Shard]) -> dict[str, torch.Tensor]:
    """Put the slices of all ranks together; copies of a slice must agree in every bit."""
    whole: dict[str, torch.Tensor] = {}
    for piece in pieces:
        if piece.name not in whole:
            whole[piece.name] = torch.full(piece.shape, torch.nan, dtype=piece.values.dtype)
        there = whole[piece.name][piece.place]
        if there.isnan().all():
            there.copy_(piece.values)
        assert torch.equal(there, piece.values), f"two ranks hold different copies of {piece.name}"
    holes = [name for name, tensor in whole.items() if tensor.isnan().any()]
    assert not holes, f"no rank holds all of {holes}"
    return whole
