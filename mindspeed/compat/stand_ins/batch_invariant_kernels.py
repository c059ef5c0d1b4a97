"""Megatron's switch for batch-invariant kernels where triton, which they are written in, is absent.

The mode is off, and asking for it is an error. Megatron imports this switch with every script.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


def is_batch_invariant_mode_enabled() -> bool:
    """Return False: the kernels need triton."""
    return False


def enable_batch_invariant_mode() -> None:
    """Refuse: the kernels need triton."""
    raise RuntimeError(
        "batch-invariant mode was asked for and triton is not installed: leave "
        "--batch-invariant-mode out, or pip install triton on a machine with a GPU"
    )


def disable_batch_invariant_mode() -> None:
    """Do nothing: the mode was never on."""


def set_batch_invariant_mode(enabled: bool = True) -> AbstractContextManager[None]:
    """Keep the mode off; refuse to turn it on."""
    if enabled:
        enable_batch_invariant_mode()
    return nullcontext()
