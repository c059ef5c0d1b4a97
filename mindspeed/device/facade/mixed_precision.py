"""Automatic mixed precision asked for on cuda is that of the cpu; torch would turn it off.

Without a dtype the one of cuda stays, fp16: a script that names none counts on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from mindspeed.device.facade.tensors import landed

if TYPE_CHECKING:
    from mindspeed.device.cpu import Cpu


def redirections(cpu: Cpu) -> Iterator[tuple[object, str, object]]:
    """Yield autocast, the questions about its state, and the scaler of losses."""
    yield torch.autocast, "__init__", _autocast(torch.autocast.__init__)
    yield torch.amp.GradScaler, "__init__", _scaler(torch.amp.GradScaler.__init__)
    yield torch, "is_autocast_enabled", _asked(torch.is_autocast_enabled)
    yield torch, "get_autocast_dtype", _asked(torch.get_autocast_dtype)
    yield torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cpu")


def _autocast(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        original(self, device_type, dtype, *args, **kwargs)

    return __init__


def _scaler(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        original(self, str(landed(device)), *args, **kwargs)

    return __init__


def _asked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def asked(device_type: str = "cuda") -> Any:
        return original("cpu" if device_type == "cuda" else device_type)

    return asked
