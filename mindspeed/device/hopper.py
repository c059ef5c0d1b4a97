"""Packages whose kernels are the fastest on Hopper, where a user has installed them."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
from dataclasses import dataclass

from packaging.version import Version

from mindspeed import device

logger = logging.getLogger(__name__)

CAPABILITY = (9, 0)


@dataclass(frozen=True)
class Package:
    """A distribution, the oldest version that will do, the module to call, and what it is for."""

    name: str
    oldest: str
    module: str
    purpose: str

    @property
    def requirement(self) -> str:
        """What pip is to be asked for, beside a CUDA 13 build of torch."""
        return f"{self.name}[cu13]>={self.oldest}"

    def is_here(self) -> bool:
        """Say whether it can be called on the device at hand."""
        return _is_usable(self)


@functools.cache
def _is_usable(package: Package) -> bool:
    """Look once: a package that cannot be used is told of, not stumbled over."""
    if device.current().capability() != CAPABILITY:
        return False
    try:
        found = importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        return False  # flash-attn may have brought a `flash_attn.cute` along, but an early one
    try:
        if Version(found) < Version(package.oldest):
            raise ImportError(f"{found} is older than {package.oldest}")
        importlib.import_module(package.module)
    except Exception as error:  # its compiler, in another version than it wants, raises anything
        logger.warning("%s is installed and cannot be used: %s", package.name, error)
        return False
    return True


FLASH_ATTENTION = Package("flash-attn-4", "4.0.0b36", "flash_attn.cute.interface", "long attention")
QUACK = Package("quack-kernels", "0.6.5", "quack.gemm_interface", "SwiGLU inside a product")
