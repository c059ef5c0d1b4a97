"""Which loaded modules may hold copies that a patch has to follow."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from types import ModuleType
from typing import Any

_OURSELVES = __name__.rpartition(".")[0] + "."
_STDLIB = os.path.dirname(os.__file__) + os.sep
_SITE, _DIST = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"


def interested_modules(packages: Collection[str]) -> dict[str, ModuleType]:
    """Return the loaded modules of `packages`, of MindSpeed and of the user's own code."""
    # By the true type: a library of cffi stands in sys.modules and only claims to be a module.
    return {
        name: module
        for name, module in list(sys.modules.items())
        if issubclass(type(module), ModuleType) and _is_interesting(name, module, packages)
    }


def namespace_of(module: ModuleType) -> dict[str, Any]:
    """Return the module's dict without waking a lazily loaded module."""
    namespace: dict[str, Any] = ModuleType.__getattribute__(module, "__dict__")
    return namespace


def _is_interesting(name: str, module: ModuleType, packages: Collection[str]) -> bool:
    top = name.partition(".")[0]
    if top not in packages and top != "__main__" and not top.startswith("mindspeed"):
        file = namespace_of(module).get("__file__")
        if not isinstance(file, str) or _SITE in file or _DIST in file or file.startswith(_STDLIB):
            return False
    return not f"{name}.".startswith(_OURSELVES)
