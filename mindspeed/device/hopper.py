"""Packages whose kernels are the fastest on Hopper, where a user has installed them."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from packaging.specifiers import SpecifierSet

from mindspeed import device
from mindspeed.device import precompile
from mindspeed.device.precompile import Kernel

logger = logging.getLogger(__name__)

CAPABILITY = (9, 0)
COMPILERS = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
NOTICEABLE = 1.0
"""Seconds of compilation that are worth a line."""


@dataclass(frozen=True)
class Package:
    """A distribution, its supported versions, the module to call, and its purpose.

    `cached` are the environment variables that make it keep compiled kernels in "{folder}",
    `uncached` those that make it keep none.
    """

    name: str
    versions: str
    module: str
    purpose: str
    cached: Mapping[str, str] = field(default_factory=dict, hash=False)
    uncached: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def requirement(self) -> str:
        """What pip is to be asked for, beside a CUDA 13 build of torch."""
        return f"{self.name}[cu13]{self.versions}"

    def takes(self, version: str) -> bool:
        """Return whether a version is supported."""
        return SpecifierSet(self.versions).contains(version, prereleases=True)

    def is_here(self) -> bool:
        """Return whether it can be called on the current device."""
        return _is_usable(self)

    def prepare(self, kernels: Sequence[Kernel], what: str) -> None:
        """Compile kernels that the cache lacks while the caller goes on, each in a process."""
        started = [precompile.start(kernel, file) for kernel, file in self._files(kernels)]
        if any(started):
            logger.info("%s: compiling %d kernels for %s", self.name, sum(started), what)

    def passes(self, trial: Callable[[], bool], what: str, kernels: Sequence[Kernel] = ()) -> bool:
        """Run kernels on a small problem, which compiles them, before a model relies on them.

        A package that fails here, or computes something else, is not used; with a warning. The
        trial waits for those of its `kernels` that another process compiles.
        """
        kept = f"kept in {folder}" if (folder := kernel_cache()) else "compiled in every run"
        logger.info("%s: kernels for %s (%s)", self.name, what, kept)
        began = time.perf_counter()
        try:
            is_right = self._run(trial, kernels)
        except Exception as error:  # compilers raise anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            logger.warning("%s is not used for %s: %s", self.name, what, reason)
            return False
        if not is_right:
            logger.warning("%s is not used for %s: its results are wrong", self.name, what)
        elif (seconds := time.perf_counter() - began) > NOTICEABLE:
            logger.info("%s: kernels for %s ready after %.1f s", self.name, what, seconds)
        return is_right

    def _run(self, trial: Callable[[], bool], kernels: Sequence[Kernel]) -> bool:
        with ExitStack() as stack:
            # Processes that claim several in one order never wait for each other in a circle.
            files = sorted(file for _, file in self._files(kernels))
            locks = [stack.enter_context(precompile.claimed(file)) for file in files]
            is_right = trial()
            for lock in locks:
                if is_right and lock is not None:
                    precompile.set_compiled(lock)
        return is_right

    def _files(self, kernels: Sequence[Kernel]) -> list[tuple[Kernel, Path]]:
        """Return kernels with their files; none where there is no folder for them.

        A user may have chosen another folder, or that the package keeps none.
        """
        folder, chosen = kernel_cache(), os.environ
        is_kept = not any(chosen.get(name) == value for name, value in self.uncached.items())
        if folder is None or not is_kept:
            return []
        versions = [*_versions(self.name), *(chosen.get(name, "") for name in self.cached)]
        return [(kernel, kernel.file(folder, versions)) for kernel in kernels]


@functools.cache
def _versions(package: str) -> list[str]:
    """Return what kernels of a package depend on beside its own source."""
    found = [f"{sys.version_info.major}.{sys.version_info.minor}"]
    for name in (package, *COMPILERS):
        try:
            found.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            found.append("")
    return found


@functools.cache
def _is_usable(package: Package) -> bool:
    """Check once: a package that cannot be used is reported here, not at its first use."""
    if device.current().capability() != CAPABILITY:
        return False
    try:
        found = importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        return False  # flash-attn may have brought a `flash_attn.cute` along, but an early one
    try:
        if not package.takes(found):
            raise ImportError(f"{found} is not {package.versions}")
        folder = kernel_cache()
        for name, value in (package.cached if folder else package.uncached).items():
            os.environ.setdefault(name, value.format(folder=folder))
        # What its compiler deprecates concerns its authors, not users who train.
        for module in ("cutlass", package.module.partition(".")[0]):
            warnings.filterwarnings("ignore", module=rf"{module}\b")
        importlib.import_module(package.module)
    except Exception as error:  # its compiler, in another version than it wants, raises anything
        logger.warning("%s is installed and cannot be used: %s", package.name, error)
        return False
    return True


@functools.cache
def kernel_cache() -> Path | None:
    """Return the folder for compiled kernels: this user's alone, since what is in it is run."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(root) / "mindspeed" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid() or not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable, or another user's")
        if folder.stat().st_mode & 0o022:
            raise PermissionError(f"others can write to {folder}")
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        logger.warning(
            "kernels are compiled in every run, there is no folder to keep them in: %s; "
            "set XDG_CACHE_HOME to a folder of your own",
            error,
        )
        return None
    return folder


# What is called of them is not all public: a later version has to be tried first.
FLASH_ATTENTION = Package(
    "flash-attn-4",
    ">=4.0.0b36,<4.1",
    "flash_attn.cute.interface",
    "long attention",
    cached={
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "{folder}/flash_attn",
    },
)
QUACK = Package(
    "quack-kernels",
    ">=0.6.5,<0.7",
    "quack.gemm_interface",
    "SwiGLU inside a GEMM",
    cached={"QUACK_CACHE_DIR": "{folder}/quack"},
    uncached={"QUACK_CACHE_ENABLED": "0"},
)
