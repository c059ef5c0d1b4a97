"""Optimizer state that is on the host between steps.

An update brings the state to the device chunk by chunk and sends it back, on streams of their own:
while one chunk is updated, the next one arrives and the one before leaves. What is on the device of
it at any time are four chunks at most. The rules of `mindspeed.memory.swap` hold: a chunk is read
after it has arrived, and its memory is used again after it has left; and the host reads its state,
to save it for example, after the last chunk of a step has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mindspeed import device
from mindspeed.device.copies import CopyStream

CHUNK_BYTES = 64 << 20

State = dict[str, Tensor]


@dataclass(frozen=True)
class Piece:
    """Some elements of a parameter, and with `of` the same ones of its gradient."""

    param: Tensor
    state: State
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of a tensor of the parameter's shape."""
        is_whole = self.stop - self.start == tensor.numel()
        return tensor if is_whole else tensor.reshape(-1)[self.start : self.stop]

    @property
    def nbytes(self) -> int:
        """The bytes of their state."""
        return sum(self.of(tensor).nbytes for tensor in self.state.values())


Update = Callable[[list[Piece], list[State]], None]
"""Updates pieces, given their state on the device, in place."""


@dataclass
class _Staged:
    """The state of a chunk while it is on the device, and the events of the last copies."""

    pieces: list[Piece]
    states: list[State]
    events: list[Any]


class HostState:
    """Host memory for state, and the copies."""

    def __init__(
        self,
        chunk_bytes: int = CHUNK_BYTES,
        to_host: CopyStream | None = None,
        to_device: CopyStream | None = None,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._to_host = to_host or CopyStream()
        self._to_device = to_device or CopyStream()
        # Weak: state that is replaced gives its memory up, and another tensor may get its address.
        self._owned: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def place(self, tensor: Tensor) -> Tensor:
        """Return a tensor of state on the host: itself, if it is there already."""
        if self._owns(tensor):
            return tensor
        buffer = device.current().host_buffer(tensor.nbytes)
        placed = buffer.view(tensor.dtype).view(tensor.shape)
        placed.copy_(tensor)
        self._owned[placed.untyped_storage()._cdata] = placed
        return placed

    def snapshot(self, tensor: Tensor) -> Tensor:
        """Return a tensor that updates do not change: a copy of state that is on the host.

        A writer in the background copies what is on a device, and reads host memory where it is.
        """
        return tensor.clone() if self._owns(tensor) else tensor

    def _owns(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._owned

    def update(self, states: Sequence[tuple[Tensor, State]], update: Update) -> None:
        """Call `update` for all of some parameters, chunk by chunk."""
        chunks = deque(self._chunks(states))
        arriving = self._fetch(chunks.popleft()) if chunks else None
        leaving: deque[_Staged] = deque()
        while arriving is not None:
            staged, arriving = arriving, self._fetch(chunks.popleft()) if chunks else None
            for event in staged.events:
                self._to_device.wait(event)
            update(staged.pieces, staged.states)
            leaving.append(self._send(staged))
            if len(leaving) > 1:
                self._release(leaving.popleft())
        for staged in leaving:
            self._release(staged)
            for event in staged.events:
                self._to_host.finish(event)

    def _chunks(self, states: Sequence[tuple[Tensor, State]]) -> Iterator[list[Piece]]:
        chunk: list[Piece] = []
        size = 0
        for piece in (piece for param, state in states for piece in self._pieces(param, state)):
            if chunk and size + piece.nbytes > self._chunk_bytes:
                yield chunk
                chunk, size = [], 0
            chunk.append(piece)
            size += piece.nbytes
        if chunk:
            yield chunk

    def _pieces(self, param: Tensor, state: State) -> Iterator[Piece]:
        count = param.numel()
        each = sum(tensor.element_size() for tensor in state.values())
        length = max(self._chunk_bytes // each, 1) if param.is_contiguous() else count
        for start in range(0, count, length):
            yield Piece(param, state, start, min(start + length, count))

    def _fetch(self, pieces: list[Piece]) -> _Staged:
        staged = _Staged(pieces, [], [])
        for piece in pieces:
            sources = {name: piece.of(tensor) for name, tensor in piece.state.items()}
            targets = {
                n: torch.empty_like(s, device=piece.param.device) for n, s in sources.items()
            }
            staged.states.append(targets)
            staged.events += [self._to_device.start(targets[n], sources[n]) for n in sources]
        return staged

    def _send(self, staged: _Staged) -> _Staged:
        events = [
            self._to_host.start(piece.of(piece.state[name]), tensor)
            for piece, state in zip(staged.pieces, staged.states)
            for name, tensor in state.items()
        ]
        return _Staged(staged.pieces, staged.states, events)

    def _release(self, staged: _Staged) -> None:
        for event in staged.events:
            self._to_host.wait(event)
        staged.states.clear()
