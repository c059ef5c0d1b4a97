"""What autograd really keeps for the backward pass, seen through its saved-tensor hooks."""

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from tests.gpt.training import Training


@dataclass(frozen=True)
class Kept:
    """A piece of memory that waits for the backward pass."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


class _Held:
    """Stands for a saved tensor inside the graph and dies with it."""

    def __init__(self, tensor: torch.Tensor, label: int) -> None:
        self.tensor = tensor
        self.label = label


class SavedTensors(AbstractContextManager["SavedTensors"]):
    """Follows saved tensors from the forward that saves them to the backward that frees them."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.label = 0
        self._parameters = {_address(parameter) for parameter in parameters}
        self._held: weakref.WeakSet[_Held] = weakref.WeakSet()
        self._hooks = saved_tensors_hooks(self._pack, lambda held: held.tensor)

    def __enter__(self) -> "SavedTensors":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def labels(self) -> set[int]:
        """Return the labels under which something was saved that is still there."""
        return {held.label for held in self._held}

    def kept(self) -> list[Kept]:
        """Return what is there now, each storage once and no parameters."""
        storages = {_address(held.tensor): held.tensor for held in self._held}
        return [
            Kept(tuple(tensor.shape), tensor.dtype, tensor.untyped_storage().nbytes())
            for address, tensor in storages.items()
            if address not in self._parameters
        ]

    def _pack(self, tensor: torch.Tensor) -> _Held:
        # Detached: an output that its own node saves would otherwise keep that node alive.
        held = _Held(tensor.detach(), self.label)
        self._held.add(held)
        return held


def kept_after_forward(training: "Training") -> list[Kept]:
    """Run one step; return what was kept when its first micro-batch had gone forward."""
    found: list[list[Kept]] = []
    with SavedTensors(training.chunks[0].parameters()) as saved:
        hook = training.wrapped[0].register_forward_hook(lambda *_: found.append(saved.kept()))
        training.step()
        hook.remove()
    return found[0]


def most_live_forwards(training: "Training") -> int:
    """Run one step; return how many forward passes at most waited for their backward at once."""
    counts: list[int] = []
    with SavedTensors(p for chunk in training.chunks for p in chunk.parameters()) as saved:

        def begin(*_: Any) -> None:
            saved.label += 1

        for chunk in training.wrapped:
            chunk.register_forward_pre_hook(begin)
            chunk.register_forward_hook(lambda *_: counts.append(len(saved.labels())))
        training.step()
    return max(counts)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
