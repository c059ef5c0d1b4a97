"""What is known of kernels that processes compile, without their compilers."""

import importlib.metadata
import shutil
import sys

import torch

from mindspeed.device import hopper, precompile


def install(monkeypatch, versions):
    """Let packages of some versions seem to be installed, and no others."""

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    _unset_variables(monkeypatch)


def keep(monkeypatch, folder):
    """Keep kernels in a folder; the processes that would compile them end at once."""
    _unset_variables(monkeypatch)  # set where there was no folder
    monkeypatch.setattr(hopper, "kernel_cache", lambda: folder)
    monkeypatch.setattr(precompile, "MIN_CORES", 1)
    monkeypatch.setattr(sys, "executable", shutil.which("true"))


def _unset_variables(monkeypatch):
    """Unset what packages hear of the folder; what is set from here on is undone too."""
    for package in (hopper.QUACK, hopper.FLASH_ATTENTION):
        for name in (*package.cached, *package.uncached):
            monkeypatch.setenv(name, "")  # else nothing would be undone
            monkeypatch.delenv(name)


def started(package, kernels):
    """Return which of some kernels a process was started for."""
    return [kernel for kernel, file in package._files(kernels) if file.exists()]


class Calls:
    """Functions that note what a compiler sees of their calls: no numbers, no sizes."""

    def __init__(self):
        self.made = []

    def noting(self, name, function):
        """Return a function that is noted."""

        def call(*args, **options):
            seen = [_describe(arg) for arg in args]
            seen += [(key, _describe(value)) for key, value in sorted(options.items())]
            self.made.append((name, *seen))
            return function(*args, **options)

        return call

    def of(self, run):
        """Return the calls of a function, each once."""
        self.made.clear()
        run()
        return set(self.made)


def _describe(value):
    if isinstance(value, torch.Tensor):
        order = tuple(sorted(range(value.ndim), key=value.stride))
        return (value.dtype, order, value.is_contiguous())
    return value
