"""Identify the caller: Megatron and users' scripts see the facade, other libraries the truth.

torch itself, transformers and the like use real CUDA where "cuda is available", and
our own packages ask mindspeed.device. Projects that drive Megatron ask on its behalf: verl seeds
Megatron's generators only where it counts a device.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import PurePath

import torch

_DRIVERS = {"mbridge", "mcore_bridge", "megatron", "swift", "verl"}
_OURS = ("mindspeed", "mindspeed_llm", "mindspeed_mm")
_LIBRARY_FOLDERS = tuple({sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")})
# Where torch.compile asks on behalf of the code that it traces.
_TRACER = "torch._dynamo.variables."
# What pip names such a folder where it is not the interpreter's own: --user, --target, Debian.
_LIBRARY_NAMES = {"site-packages", "dist-packages"}


def is_other_library(depth: int = 2) -> bool:
    """Return whether the caller `depth` frames up is a library, Megatron and its drivers aside."""
    if torch.compiler.is_dynamo_compiling():
        return False
    frame = sys._getframe(depth)
    module = str(frame.f_globals.get("__name__", ""))
    package = module.partition(".")[0]
    if package in _DRIVERS or module.startswith(_TRACER):
        return False
    return package in _OURS or _is_installed(frame.f_code.co_filename)


def is_torch(depth: int = 2) -> bool:
    """Return whether the caller `depth` frames up is torch, which asks for itself."""
    module = str(sys._getframe(depth).f_globals.get("__name__", ""))
    return module.partition(".")[0] == "torch" and not module.startswith(_TRACER)


@functools.cache
def _is_installed(filename: str) -> bool:
    if filename.startswith((*_LIBRARY_FOLDERS, "<frozen")):
        return True
    return not _LIBRARY_NAMES.isdisjoint(PurePath(filename).parts)
