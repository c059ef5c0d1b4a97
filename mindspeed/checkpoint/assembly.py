"""Assemble tensors from shards of others, copying only when the values are needed.

A source offers each full tensor as shards: views of what its files hold. A stored tensor (of a
file to write, or a parameter) is described by slice copies. Where a shard and a slice copy overlap,
values are copied. Reading, writing and resharding are all this.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed.checkpoint.file_io import aligned
from mindspeed.checkpoint.tensor_slice import (
    TensorSlice,
    full_slice,
    intersection,
    slice_numel,
    slice_shape,
    to_index,
    translate,
)
from mindspeed.config import ConfigError

MAX_LISTED = 5
"""How many names an error lists."""


@dataclass(frozen=True)
class Shard:
    """A view of the values in one slice of a full tensor."""

    region: TensorSlice
    values: torch.Tensor


@dataclass
class FullTensor:
    """A full tensor as shards that do not overlap."""

    shards: list[Shard] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of its shards."""
        return self.shards[0].values.dtype

    def add(self, region: TensorSlice, values: torch.Tensor) -> None:
        """Add a shard unless it is present, as where ranks hold replicas."""
        if all(shard.region != region for shard in self.shards):
            self.shards.append(Shard(region, values))

    def padded_to(self, rows: int) -> "FullTensor":
        """Return the tensor with its last row repeated until there are `rows`."""
        have = max(shard.region[0][1] for shard in self.shards)
        if rows <= have:
            return self
        padding = [
            Shard(((have, rows), *shard.region[1:]), _last_row(shard, rows - have))
            for shard in self.shards
            if shard.region[0][1] == have
        ]
        return FullTensor(self.shards + padding)


FullTensors = Mapping[str, FullTensor]
"""What a source offers: each full tensor by its name."""


@dataclass(frozen=True)
class SliceCopy:
    """Slice `target` of a stored tensor is slice `source` of the full tensor `name`.

    The stored tensor may have more dimensions; `target` has size one in those.
    """

    name: str
    source: TensorSlice
    target: TensorSlice
    is_transposed: bool = False
    is_padded: bool = False
    """Rows that the source lacks are copies of its last one."""

    def to_full(self, stored: torch.Tensor) -> torch.Tensor:
        """Return a view of the slice in the orientation of the full tensor."""
        values = stored[to_index(self.target)].reshape(self._trailing_shape())
        return values.t() if self.is_transposed else values

    def to_stored(
        self, region: TensorSlice, values: torch.Tensor
    ) -> tuple[TensorSlice, torch.Tensor]:
        """Return where values of the full tensor, at `region`, lie in the stored one, reshaped."""
        leading = self.target[: len(self.target) - len(self.source)]
        trailing = self.target[len(leading) :]
        if self.is_transposed:
            at = translate(region[::-1], self.source[::-1], trailing)
            return (*leading, *at), values.t().reshape(*(1 for _ in leading), *slice_shape(at))
        at = translate(region, self.source, trailing)
        return (*leading, *at), values.reshape(*(1 for _ in leading), *slice_shape(at))

    def _trailing_shape(self) -> tuple[int, ...]:
        return slice_shape(self.target)[len(self.target) - len(self.source) :]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file or model, and the slice copies that fill it."""

    name: str
    shape: tuple[int, ...]
    copies: tuple[SliceCopy, ...]
    view: tuple[int, ...] | None = None
    """The shape that the copies refer to, where it is not the tensor's."""
    is_float32: bool = False
    order: tuple[int, ...] = ()
    """The dimensions of that shape in the order in which the copies name them; none for as they
    are."""

    @property
    def view_shape(self) -> tuple[int, ...]:
        """Return the shape that the copies refer to."""
        return self.view or self.shape

    def pieces(self, tensors: FullTensors) -> list[tuple[TensorSlice, torch.Tensor]]:
        """Return views that fill the tensor, each with its slice; raise if values are missing."""
        found: list[tuple[TensorSlice, torch.Tensor]] = []
        for copy in self.copies:
            held = 0
            for shard in _full_tensor(copy, tensors, self.name).shards:
                if (shared := intersection(shard.region, copy.source)) is not None:
                    at = translate(shared, shard.region, full_slice(shard.values.shape))
                    piece = copy.to_stored(shared, shard.values[to_index(at)])
                    found.append(self._in_order(*piece))
                    held += slice_numel(shared)
            if held != (total := slice_numel(copy.source)):
                raise ConfigError(
                    f"{copy.name}: {total - held} of the {total} values for {self.name} are in no "
                    "source file"
                )
        return found

    def _in_order(
        self, region: TensorSlice, values: torch.Tensor
    ) -> tuple[TensorSlice, torch.Tensor]:
        """Return a piece with the dimensions as they are stored."""
        if not self.order:
            return region, values
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return tuple(region[dim] for dim in back), values.permute(back)

    def dtype(self, tensors: FullTensors, requested: torch.dtype | None) -> torch.dtype:
        """Return the dtype it is stored in: the requested one, else that of its source."""
        if self.is_float32 or requested is None:
            return _full_tensor(self.copies[0], tensors, self.name).dtype
        return requested

    def fill(self, target: torch.Tensor, tensors: FullTensors) -> None:
        """Copy the values into a tensor of this shape, of any dtype and on any device."""
        for region, values in self.pieces(tensors):
            target.view(self.view_shape)[to_index(region)].copy_(aligned(values))


def gather(
    stored: Iterable[StoredTensor], tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, TensorSlice, torch.Tensor]]:
    """Yield (full tensor, slice, view) for every slice copy of tensors that have been read."""
    for tensor in stored:
        values = tensors[tensor.name]
        for copy in tensor.copies:
            yield copy.name, copy.source, copy.to_full(values.view(tensor.view_shape))


def check_names(found: Iterable[str], expected: Iterable[str], where: str) -> None:
    """Raise unless exactly the expected tensors were found."""
    have, want = set(found), set(expected)
    problems = []
    if missing := sorted(want - have):
        problems.append(f"{_listed(missing)} missing")
    if unexpected := sorted(have - want):
        problems.append(f"{_listed(unexpected)} not expected")
    if problems:
        raise ConfigError(f"{where}: {' and '.join(problems)} (is the config that of this model?)")


def check_shape(where: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless a tensor is floating point and has the shape that the config implies."""
    if tuple(tensor.shape) != shape:
        raise ConfigError(
            f"{where}: {name} has the shape {tuple(tensor.shape)}, the config makes it {shape}"
        )
    if not tensor.is_floating_point():
        raise ConfigError(f"{where}: {name} holds {tensor.dtype}, not floating-point numbers")


def only_tensors(state_dict: Mapping[Any, Any], where: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict without the extra state of layers."""
    found = {}
    for name, value in state_dict.items():
        if isinstance(name, str) and not name.endswith("_extra_state") and value is not None:
            if not isinstance(value, torch.Tensor):
                raise ConfigError(f"{where}: {name} is a {type(value).__name__}, not a tensor")
            found[name] = value
    return found


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_LISTED
    shown = ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
    return f"{shown} {'are' if len(names) > 1 else 'is'}"


def _full_tensor(copy: SliceCopy, tensors: FullTensors, stored: str) -> FullTensor:
    if copy.name not in tensors:
        raise ConfigError(f"{stored} needs the weight {copy.name}, which the source does not have")
    found = tensors[copy.name]
    return found.padded_to(copy.source[0][1]) if copy.is_padded else found


def _last_row(shard: Shard, count: int) -> torch.Tensor:
    return shard.values[-1:].expand(count, *shard.values.shape[1:])
