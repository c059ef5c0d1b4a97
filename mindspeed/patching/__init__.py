"""Replace, wrap and add on other people's code: checked, reversible, reported."""

from mindspeed.patching.imports import Aliases, find_without_import, is_installed
from mindspeed.patching.patch import Effect, Patch, PatchError, PatchRecord
from mindspeed.patching.patcher import Patcher

__all__ = [
    "Aliases",
    "Effect",
    "Patch",
    "PatchError",
    "PatchRecord",
    "Patcher",
    "find_without_import",
    "is_installed",
]
