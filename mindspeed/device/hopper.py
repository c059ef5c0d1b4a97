"""Packages whose kernels are the fastest on Hopper, where a user has installed them."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from mindspeed import device

logger = logging.getLogger(__name__)

CAPABILITY = (9, 0)


@dataclass(frozen=True)
class Package:
    """A distribution, the versions that will do, the module to call, and what it is for.

    `trial` is a function of it (module:name) that fails where its kernels would.
    """

    name: str
    versions: str
    module: str
    purpose: str
    trial: str = ""

    @property
    def requirement(self) -> str:
        """What pip is to be asked for, beside a CUDA 13 build of torch."""
        return f"{self.name}[cu13]{self.versions}"

    def takes(self, version: str) -> bool:
        """Say whether this is one of the versions that will do."""
        return SpecifierSet(self.versions).contains(version, prereleases=True)

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
        if not package.takes(found):
            raise ImportError(f"{found} is not {package.versions}")
        importlib.import_module(package.module)
        if package.trial:
            module, _, name = package.trial.partition(":")
            getattr(importlib.import_module(module), name)()
    except Exception as error:  # its compiler, in another version than it wants, raises anything
        logger.warning("%s is installed and cannot be used: %s", package.name, error)
        return False
    return True


# What is called of them is not all public: a later version has to be tried first.
FLASH_ATTENTION = Package(
    "flash-attn-4", ">=4.0.0b36,<4.1", "flash_attn.cute.interface", "long attention"
)
QUACK = Package(
    "quack-kernels",
    ">=0.6.5,<0.7",
    "quack.gemm_interface",
    "SwiGLU inside a product",
    trial="quack.cache:get_cache_path",  # a folder for its kernels, named after the user
)
