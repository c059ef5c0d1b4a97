"""Megatron's check of arguments for FSDP where there are no CUDA queues to count."""

from __future__ import annotations

import functools
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

_FLAGS = ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")


def wrap_validate_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Take the number of CUDA queues out of the environment if FSDP is asked for."""

    @functools.wraps(original)
    def validate_args(args: Namespace, *others: Any, **kwargs: Any) -> Any:
        if any(getattr(args, flag, False) for flag in _FLAGS):
            os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        return original(args, *others, **kwargs)

    return validate_args
