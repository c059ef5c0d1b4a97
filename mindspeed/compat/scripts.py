"""Megatron-LM's scripts at start: checks of the environment that fail where nothing is wrong."""

from __future__ import annotations

import functools
import importlib.util
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core import datasets

_FSDP_FLAGS = ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")


def wrap_validate_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Unset CUDA_DEVICE_MAX_CONNECTIONS if FSDP is requested: a cpu has no CUDA queues."""

    @functools.wraps(original)
    def validate_args(args: Namespace, *others: Any, **kwargs: Any) -> Any:
        if any(getattr(args, flag, False) for flag in _FSDP_FLAGS):
            os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        return original(args, *others, **kwargs)

    return validate_args


def wrap_compile_helpers(original: Callable[[], None]) -> Callable[[], None]:
    """Compile nothing where megatron-core came with the compiled module instead of its makefile."""

    @functools.wraps(original)
    def compile_helpers() -> None:
        has_makefile = Path(datasets.__file__).with_name("Makefile").is_file()
        if has_makefile or importlib.util.find_spec(f"{datasets.__name__}.helpers_cpp") is None:
            original()

    return compile_helpers


def load_no_kernels(args: Namespace) -> None:
    """Compile nothing: none of the legacy CUDA kernels are left."""


def wrap_is_fa_min_version(original: Callable[..., bool]) -> Callable[..., bool]:
    """Return False where flash-attn is absent; flash-attn-4 shares its folder but is not it."""

    @functools.wraps(original)
    def is_fa_min_version(version: str, check_equality: bool = True) -> bool:
        try:
            return original(version, check_equality)
        except ImportError:
            return False

    return is_fa_min_version
