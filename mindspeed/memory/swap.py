"""Tensors that wait for backward in host memory.

Inside a `Region`, around one call of a module, saved tensors are copied to pinned host memory on a
stream of their own. The device memory is given up when the next region ends: the compute stream
waits for the copy first, so that nothing writes there before. Backward brings the tensors back on
another stream, those of the region before one region ahead, and the compute stream waits for each
copy before it uses it. The rules that keep this free of races:

- a copy to the host starts after the work that was queued when its tensor was saved;
- a tensor on the device lives until the compute stream has waited for its copy;
- a copy back starts after the copy to the host, and after the work queued when its target was made;
- a host buffer is used again after the copy that reads it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mindspeed import device
from mindspeed.device.copies import CopyStream
from mindspeed.memory.recompute import is_weight

# Copying less than this costs more than it saves.
MIN_BYTES = 1 << 20


class HostBuffers:
    """Host memory, kept for reuse."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[tuple[Tensor, Any]]] = defaultdict(list)
        self.total_bytes = 0

    def take(self, size: int) -> tuple[Tensor, Any]:
        """Return a buffer and the event of the last copy that reads it, if there is one."""
        if self._free[size]:
            return self._free[size].pop()
        self.total_bytes += size
        return device.current().host_buffer(size), None

    def give_back(self, buffer: Tensor, read: Any) -> None:
        """Take a buffer back that is free after an event."""
        self._free[buffer.numel()].append((buffer, read))


class Swapper:
    """The copies, the host memory and the regions of one part of a model."""

    def __init__(
        self,
        min_bytes: int = MIN_BYTES,
        to_host: CopyStream | None = None,
        to_device: CopyStream | None = None,
    ) -> None:
        self.min_bytes = min_bytes
        self.to_host = to_host or CopyStream()
        self.to_device = to_device or CopyStream()
        self.buffers = HostBuffers()
        self._leaving: deque[SwappedTensor] = deque()
        self._by_view: dict[Any, SwappedTensor] = {}

    def keep(self, region: Region, x: Tensor) -> Tensor | SwappedTensor:
        """Return what autograd keeps of a tensor: itself, or what brings it back."""
        is_expanded = x.nbytes > x.untyped_storage().nbytes()
        if is_weight(x) or is_expanded or x.nbytes < self.min_bytes:
            return x
        # Unique as long as the tensor is on the device, and no longer.
        view = (x.untyped_storage()._cdata, x.storage_offset(), x.size(), x.stride(), x.dtype)
        swapped = self._by_view.get(view)
        if swapped is None:
            swapped = SwappedTensor(self, region, x.detach(), view)
            self._leaving.append(swapped)
            self._by_view[view] = swapped
        swapped.saved += 1
        return swapped

    def release(self, but: Region | None = None) -> None:
        """Give up device memory of all regions before one, or of all."""
        while self._leaving and self._leaving[0].region is not but:
            swapped = self._leaving.popleft()
            del self._by_view[swapped.view]
            swapped.leave()


class Region:
    """Saved-tensor hooks around one call of a module.

    Args:
        swapper: what copies.
        previous: the region before in the same forward pass, whose tensors backward needs next.
        only: the one tensor to take, if the others are to stay.
    """

    def __init__(
        self, swapper: Swapper, previous: Region | None, only: Tensor | None = None
    ) -> None:
        self._swapper = swapper
        self._previous = previous
        self._only = None if only is None else only.untyped_storage()._cdata
        # Weak: a tensor knows its region.
        self._tensors: list[weakref.ref[SwappedTensor]] = []
        self._hooks = saved_tensors_hooks(self.pack, _unpack)

    def __enter__(self) -> Region:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._swapper.release(but=self)

    def pack(self, x: Tensor) -> Tensor | SwappedTensor:
        """Keep a tensor for backward."""
        if self._only not in (None, x.untyped_storage()._cdata):
            return x
        kept = self._swapper.keep(self, x)
        if isinstance(kept, SwappedTensor):
            self._tensors.append(weakref.ref(kept))
        return kept

    def prefetch_previous(self) -> None:
        """Start to bring back what backward needs after this region; only once."""
        previous, self._previous = self._previous, None
        if previous is None:
            return
        for reference in previous._tensors:
            swapped = reference()
            if swapped is not None:
                swapped.fetch()


class SwappedTensor:
    """A saved tensor that is on its way to the host, there, or on its way back."""

    def __init__(self, swapper: Swapper, region: Region, x: Tensor, view: Any) -> None:
        self.region = region
        self.view = view
        self.saved = 0
        """How often autograd keeps it."""
        self._opened = 0
        self._swapper = swapper
        self._here: Tensor | None = x
        self._like = torch.empty_like(x, device="meta")
        self._device = x.device
        self._buffer, read = swapper.buffers.take(x.nbytes)
        after = () if read is None else (read,)
        self._on_host = swapper.to_host.start(self._host(), x, *after)
        self._arrived: Any = None
        self._read: Any = None

    def leave(self) -> None:
        """Give up the tensor on the device, once its copy is done."""
        self._swapper.to_host.wait(self._on_host)
        self._here = None

    def fetch(self) -> None:
        """Start the copy back, unless the tensor is on the device."""
        if self._here is None:
            self._here = torch.empty_like(self._like, device=self._device)
            start = self._swapper.to_device.start
            self._arrived = self._read = start(self._here, self._host(), self._on_host)

    def tensor(self) -> Tensor:
        """Return the tensor to the computation; the last time, keep it no longer."""
        self.region.prefetch_previous()
        self.fetch()
        if self._arrived is not None:
            self._swapper.to_device.wait(self._arrived)
        found = self._here
        assert found is not None
        self._opened += 1
        if self._opened >= self.saved and self._arrived is not None:
            self._here = self._arrived = None
            self._opened = 0
        return found

    def _host(self) -> Tensor:
        flat = self._buffer.view(self._like.dtype)
        return flat.as_strided(self._like.size(), self._like.stride())

    def __del__(self) -> None:
        # Brought back and not used: its memory must not be used again before the copy is done.
        if getattr(self, "_arrived", None) is not None:
            self._swapper.to_device.wait(self._arrived)
        if hasattr(self, "_on_host"):
            self._swapper.buffers.give_back(self._buffer, self._read or self._on_host)


def _unpack(kept: Tensor | SwappedTensor) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.tensor()


def is_swap(pack: Any) -> bool:
    """Return whether a pack hook is that of a region: it keeps the graph and every number."""
    return isinstance(getattr(pack, "__self__", None), Region)
