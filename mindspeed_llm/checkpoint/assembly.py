"""Put tensors together from parts of others, without copying before the numbers are needed.

A source offers each whole weight as parts: views of what its files hold. A stored tensor (of a
file to write, or a parameter) is made of tiles: boxes of whole weights. Where they meet, a part is
copied into a tile. Reading, writing and resharding are all this.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.boxes import (
    Box,
    intersection,
    moved,
    sizes,
    slices,
    volume,
    whole,
)
from mindspeed_llm.checkpoint.mapped_file import aligned


@dataclass(frozen=True)
class Part:
    """A view whose numbers are the box `place` of a whole weight."""

    place: Box
    values: torch.Tensor


@dataclass
class Whole:
    """A whole weight: its parts do not overlap."""

    parts: list[Part] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of its numbers."""
        return self.parts[0].values.dtype

    def add(self, place: Box, values: torch.Tensor) -> None:
        """Add a part unless it is there already, as where ranks hold copies."""
        if all(part.place != place for part in self.parts):
            self.parts.append(Part(place, values))

    def with_rows(self, rows: int) -> "Whole":
        """Return it with the last row repeated until there are `rows`."""
        have = max(part.place[0][1] for part in self.parts)
        if rows <= have:
            return self
        padding = [
            Part(((have, rows), *part.place[1:]), _last_row(part, rows - have))
            for part in self.parts
            if part.place[0][1] == have
        ]
        return Whole(self.parts + padding)


Wholes = Mapping[str, Whole]
"""What a source offers: each whole weight by its name."""


@dataclass(frozen=True)
class Tile:
    """The box `at` of a stored tensor is the box `place` of the weight `name`, maybe transposed.

    The stored tensor may have more dimensions; `at` is one thick in those.
    """

    name: str
    place: Box
    at: Box
    is_transposed: bool = False
    is_padded: bool = False
    """Rows that the source lacks are copies of its last one."""

    def to_whole(self, stored: torch.Tensor) -> torch.Tensor:
        """Take the tile out of a stored tensor, as the weight has it."""
        values = stored[slices(self.at)].reshape(self._plain_sizes())
        return values.t() if self.is_transposed else values

    def to_stored(self, place: Box, values: torch.Tensor) -> tuple[Box, torch.Tensor]:
        """Return where numbers of the weight, at `place`, lie in the stored tensor, and as what."""
        leading = self.at[: len(self.at) - len(self.place)]
        plain_at = self.at[len(leading) :]
        if self.is_transposed:
            turned = moved(place[::-1], self.place[::-1], plain_at)
            return (*leading, *turned), values.t().reshape(*(1 for _ in leading), *sizes(turned))
        box = moved(place, self.place, plain_at)
        return (*leading, *box), values.reshape(*(1 for _ in leading), *sizes(box))

    def _plain_sizes(self) -> tuple[int, ...]:
        return sizes(self.at)[len(self.at) - len(self.place) :]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file or model, and the tiles it is made of."""

    name: str
    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]
    view: tuple[int, ...] | None = None
    """The shape that the tiles speak of, where it is not the tensor's."""
    is_float32: bool = False

    @property
    def viewed(self) -> tuple[int, ...]:
        """Return the shape that the tiles speak of."""
        return self.view or self.shape

    def pieces(self, wholes: Wholes) -> list[tuple[Box, torch.Tensor]]:
        """Return views that fill the tensor, each with its box; raise if something is missing."""
        found: list[tuple[Box, torch.Tensor]] = []
        for tile in self.tiles:
            held = 0
            for part in _whole_for(tile, wholes, self.name).parts:
                if (shared := intersection(part.place, tile.place)) is not None:
                    at = moved(shared, part.place, whole(part.values.shape))
                    found.append(tile.to_stored(shared, part.values[slices(at)]))
                    held += volume(shared)
            if held != volume(tile.place):
                raise ConfigError(
                    f"{tile.name}: {volume(tile.place) - held} of the {volume(tile.place)} numbers "
                    f"for {self.name} are in no source file"
                )
        return found

    def dtype(self, wholes: Wholes, wanted: torch.dtype | None) -> torch.dtype:
        """Return the type it is stored in: the wanted one, else that of its source."""
        if self.is_float32 or wanted is None:
            return _whole_for(self.tiles[0], wholes, self.name).dtype
        return wanted

    def fill(self, target: torch.Tensor, wholes: Wholes) -> None:
        """Copy the numbers into a tensor of this shape, of any type and on any device."""
        for box, values in self.pieces(wholes):
            target.view(self.viewed)[slices(box)].copy_(aligned(values))


def gather(
    stored: Iterable[Stored], tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """Yield (weight, place, view) for every tile of tensors that have been read."""
    for tensor in stored:
        values = tensors[tensor.name]
        for tile in tensor.tiles:
            yield tile.name, tile.place, tile.to_whole(values.view(tensor.viewed))


def _whole_for(tile: Tile, wholes: Wholes, stored: str) -> Whole:
    if tile.name not in wholes:
        raise ConfigError(f"{stored} needs the weight {tile.name}, which the source does not have")
    found = wholes[tile.name]
    return found.with_rows(tile.place[0][1]) if tile.is_padded else found


def _last_row(part: Part, count: int) -> torch.Tensor:
    return part.values[-1:].expand(count, *part.values.shape[1:])
