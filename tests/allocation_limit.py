"""A device with little memory: allocations beyond a limit fail as they do on an accelerator."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationLimit(TorchDispatchMode):
    """Raises the device's error once the tensors made inside, and still there, exceed a limit."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        if sum(self._alive.values()) > self._limit:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 20.00 MiB\nsecond line")
        return result

    def _count(self, storage):
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, key, None)
