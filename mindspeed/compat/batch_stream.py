"""Batches that come to the device on a stream of their own.

Megatron's scripts send the length of a batch's list of documents, even where there is none, by a
copy that the host waits for. On the stream of the model it waits for all that was queued there, in
every micro-batch; on another it waits for the batch alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mindspeed import device


def wrap_get_batch(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Fetch a batch on a stream beside that of the model, which then waits for it."""
    make_stream = functools.cache(device.current().stream)

    @functools.wraps(original)
    def get_batch(*args: Any, **kwargs: Any) -> dict[str, Any]:
        here, stream = device.current().current_stream(), make_stream()
        with stream:
            batch = original(*args, **kwargs)
        here.wait_stream(stream)
        for value in batch.values():
            if torch.is_tensor(value):
                value.record_stream(here)  # its memory belongs to the other stream
        return batch

    return get_batch
