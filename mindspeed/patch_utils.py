"""Patches that other projects register by dotted name, applied by the engine that features use."""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, ClassVar

from mindspeed.features.activation import current
from mindspeed.features.base import Level
from mindspeed.patching import Patch, find_without_import

__all__ = ["MindSpeedPatchesManager", "RegisteredPatch"]

# A function of such a name takes the original and returns what stands in its place.
_WRAPPERS = ("wrapper", "decorator")


class RegisteredPatch:
    """What is registered for one target: at most one replacement, and any number of wraps."""

    def __init__(self, name: str) -> None:
        self.orig_module_name, self._path = _split(name)
        self.orig_func_name = self._path.rpartition(".")[2]
        self._target = f"{self.orig_module_name}:{self._path}"
        self._owner = f"registered patch of {name}"
        self._name = name
        self._replacement: object | None = None
        self._wraps: list[Callable[[Any], Any]] = []
        self._may_be_missing = False

    @property
    def orig_func(self) -> Any:
        """What stands there without this patch; None where its module is not imported."""
        return current().patcher.original(self._target) or self._read()

    def set_patch_func(
        self, new: Any, force_patch: bool = False, create_dummy: bool = False
    ) -> None:
        """Register a replacement, or a wrap if the function's name ends in wrapper or decorator."""
        self._may_be_missing |= create_dummy
        if isinstance(new, FunctionType) and new.__name__.endswith(_WRAPPERS):
            if new not in self._wraps:
                self._wraps.append(new)
        elif self._replacement not in (None, new) and not force_patch:
            raise RuntimeError(
                f"{self._name} has a replacement already, {self._replacement!r}: give "
                "force_patch=True to take its place, or a function whose name ends in wrapper"
            )
        else:
            self._replacement = new

    def apply_patch(self) -> None:
        """Put what is registered in force; where its module is not imported, the patch waits."""
        self.remove_patch()
        current().patcher.apply(self._owner, self._patches(), level=int(Level.ALGORITHM))

    def remove_patch(self) -> None:
        """Leave the target as it was."""
        current().patcher.revert(self._owner)

    def is_applied(self) -> bool:
        """Return whether the target is patched now."""
        records = [each for each in current().patcher.report() if each.owner == self._owner]
        return any(each.state == "applied" for each in records)

    def _patches(self) -> list[Patch]:
        why = "registered by name"
        patches = [Patch.wrap(self._target, wrap, why) for wrap in self._wraps]
        if self._replacement is not None:
            adds = self._may_be_missing and self._read() is None
            patch = Patch.add if adds else Patch.replace
            patches.append(patch(self._target, self._replacement, why))
        return patches

    def _read(self) -> Any:
        value: Any = sys.modules.get(self.orig_module_name)
        for part in self._path.split("."):
            value = getattr(value, part, None)
        return value


class MindSpeedPatchesManager:
    """The patches of other projects; the names and the class itself are what they import."""

    patches_info: ClassVar[dict[str, RegisteredPatch]] = {}

    @staticmethod
    def register_patch(
        orig_func_name: str,
        new_func: Any = None,
        force_patch: bool = False,
        create_dummy: bool = False,
    ) -> None:
        """Register a patch of "package.module.name"; it takes effect with `apply_patches`.

        `create_dummy` adds a name that its module lacks.
        """
        patches = MindSpeedPatchesManager.patches_info
        patch = patches.get(orig_func_name) or RegisteredPatch(orig_func_name)
        patch.set_patch_func(new_func, force_patch, create_dummy)
        patches[orig_func_name] = patch

    @staticmethod
    def apply_patches() -> None:
        """Put every registered patch in force."""
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.apply_patch()

    @staticmethod
    def remove_patches() -> None:
        """Take every registered patch back; they stay registered."""
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.remove_patch()


def _split(name: str) -> tuple[str, str]:
    """Split "package.module.Class.method" where the module ends."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        if module in sys.modules or find_without_import(module) is not None:
            return module, ".".join(parts[count:])
    if len(parts) < 2:
        raise ValueError(f"{name!r} names no attribute of a module: give package.module.name")
    return ".".join(parts[:-1]), parts[-1]  # not installed: the patch waits for it
