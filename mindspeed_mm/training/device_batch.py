"""A batch on the device."""

from typing import Any

import torch

from mindspeed import device


def move_to_device(batch: Any, dtype: torch.dtype | None = None) -> Any:
    """Move a batch to the device, in place where it is a dict or a list, and return it.

    Every tensor in it moves, however deep; floating ones are cast to `dtype`, if it is given.
    What is no tensor stays as it is.
    """
    if isinstance(batch, torch.Tensor):
        target = dtype if batch.is_floating_point() else None
        return batch.to(device.current().torch_device, target, non_blocking=True)
    if isinstance(batch, dict):
        batch.update({key: move_to_device(value, dtype) for key, value in batch.items()})
    elif isinstance(batch, list):
        batch[:] = [move_to_device(value, dtype) for value in batch]
    elif isinstance(batch, tuple):
        return tuple(move_to_device(value, dtype) for value in batch)
    return batch
