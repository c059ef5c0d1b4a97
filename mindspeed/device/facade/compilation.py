"""torch.compile inside Megatron: run the small fusions eagerly.

On a cpu, compiling them takes minutes and a C++ compiler to save microseconds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mindspeed.device.cpu import Cpu


def megatron_modules() -> list[ModuleType]:
    """List the modules of Megatron that are imported by now."""
    names = [name for name in sys.modules if name.partition(".")[0] == "megatron"]
    return [sys.modules[name] for name in names]


def redirections(cpu: Cpu) -> Iterator[tuple[object, str, object]]:
    """Yield a torch.compile that leaves Megatron's functions alone, and undo what it did before."""
    yield torch, "compile", _eager_for_megatron(torch.compile)
    for module in megatron_modules():
        owned = [value for value in vars(module).values() if isinstance(value, type)]
        for owner in (module, *(cls for cls in owned if cls.__module__ == module.__name__)):
            for name, value in list(vars(owner).items()):
                eager = getattr(value, "_torchdynamo_orig_callable", None)
                if eager is not None:
                    yield owner, name, eager


def _eager_for_megatron(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if caller.partition(".")[0] != "megatron":
            return original(model, *args, **kwargs)
        return model if model is not None else lambda function: function

    return compile
