"""Replace, wrap and add on somebody else's code: checked, reversible, reported."""

from mindspeed.patching.aliases import Aliases
from mindspeed.patching.errors import PatchError
from mindspeed.patching.finding import find_without_import
from mindspeed.patching.patch import Effect, Patch, PatchRecord
from mindspeed.patching.patcher import Patcher

__all__ = [
    "Aliases",
    "Effect",
    "Patch",
    "PatchError",
    "PatchRecord",
    "Patcher",
    "find_without_import",
]
