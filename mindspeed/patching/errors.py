"""How a patch fails: always with its owner, its target and the version of the package patched."""

from __future__ import annotations

import sys
from importlib import metadata

from mindspeed.patching.patch import Patch

# Where a package's version stands if not in the top-level module: `megatron` is a namespace.
_VERSION_MODULE = {"megatron": "megatron.core"}


class PatchError(RuntimeError):
    """A patch that cannot be applied; names its owner, its target and the version found."""


def patch_error(owner: str, patch: Patch, reason: str) -> PatchError:
    """Build the error of `owner`'s patch."""
    version = package_version(patch.module)
    return PatchError(f"{owner}: cannot {patch.kind} {patch.target} ({version}): {reason}")


def package_version(module: str) -> str:
    """Name the package that `module` belongs to, with its version."""
    top = module.partition(".")[0]
    if top in _VERSION_MODULE:
        loaded = getattr(sys.modules.get(_VERSION_MODULE[top]), "__version__", None)
        if loaded:
            return f"{_VERSION_MODULE[top]} {loaded}"
    try:
        return f"{top} {metadata.version(top)}"
    except metadata.PackageNotFoundError:
        declared = getattr(sys.modules.get(top), "__version__", None)
    if declared:
        return f"{top} {declared}"
    for distribution in metadata.packages_distributions().get(top, ()):  # slow: reads every file
        return f"{distribution} {metadata.version(distribution)}"
    return f"{top}, version unknown"
