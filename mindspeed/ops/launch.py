"""Launch a Triton kernel without the overhead of Triton's own launcher.

Triton inspects every argument, the options and the environment at each launch: tens of
microseconds, which a training step pays hundreds of times. What selects the binary is small:
dtypes, alignment and the values of integers. Compiled binaries are cached here by these.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mindspeed import device

_ALIGNED, _INT32 = 16, 31


class _Binary:
    """A compiled kernel and the values of its constants, which its launcher takes last."""

    def __init__(self, kernel: JITFunction[Any], compiled: Any, constants: dict[str, Any]) -> None:
        self._run = compiled.run
        self._fixed = (compiled.function, compiled.packed_metadata)
        self._constants = [constants[name] for name in kernel.arg_names if name in constants]

    def launch(self, grid: tuple[int, ...], stream: int, args: tuple[Any, ...]) -> None:
        """Enqueue it on a stream."""
        x, y, z = (*grid, 1, 1)[:3]
        self._run(x, y, z, stream, *self._fixed, None, None, None, *args, *self._constants)


_binaries: dict[tuple[Any, ...], _Binary] = {}


@torch.compiler.assume_constant_result  # Dynamo ignores it on a cached function itself
def multiprocessors() -> int:
    """Return the number of multiprocessors of the current device; a constant for a compiler."""
    return _multiprocessors()


@functools.cache
def _multiprocessors() -> int:
    return device.current().multiprocessors()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run kernel[grid](*args, **constants): constants are its last parameters, and options."""
    if torch.compiler.is_compiling() or not isinstance(kernel, JITFunction) or _has_launch_hook():
        kernel[grid](*args, **constants)
        return
    device = driver.active.get_current_device()
    key = (kernel, device, *constants.items(), *_signature(args))
    binary = _binaries.get(key)
    if binary is None:
        _binaries[key] = _Binary(kernel, kernel[grid](*args, **constants), constants)
    else:
        binary.launch(grid, driver.active.get_current_stream(device), args)


def _signature(values: tuple[Any, ...]) -> list[Any]:
    """Return what Triton specialises on: dtypes, None, 1, and which values are multiples of 16."""
    signature: list[Any] = []
    add = signature.append
    for value in values:  # one loop: a call for each value would take as long as a launch
        if value is None or value is True or value is False:
            add(value)
        elif isinstance(value, Tensor):
            add(value.dtype)
            add(value.data_ptr() % _ALIGNED == 0)
        elif isinstance(value, int) and value != 1:
            add(2 + (value % _ALIGNED == 0) + 2 * (value.bit_length() > _INT32))
        else:
            add(float if isinstance(value, float) else value)
    return signature


def _has_launch_hook() -> bool:
    """Return whether a profiler has registered a hook on every launch."""
    return bool(knobs.runtime.launch_enter_hook.calls)
