"""Batches that no other tensor-parallel rank waits for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from mindspeed import device


def wrap_get_batch(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Hand a batch on where the group has one rank; what it consists of, the first one tells."""
    names: list[str] = []

    @functools.wraps(original)
    def get_batch(data_iterator: Iterator[Any] | None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        from megatron.core import parallel_state

        if names and parallel_state.get_tensor_model_parallel_world_size() == 1:
            assert data_iterator is not None
            data = next(data_iterator)
            return {name: _placed(data.get(name)) for name in names}
        batch = original(data_iterator, *args, **kwargs)
        names[:] = batch
        return batch

    return get_batch


def _placed(value: Any) -> Any:
    if value is None:
        return None
    return value.to(device.current().torch_device, non_blocking=True)
