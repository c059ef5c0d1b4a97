"""Training with callbacks: what a script of the user imports."""

import importlib
from typing import TYPE_CHECKING, Any

from mindspeed.compat.stand_ins.megatron_training.global_vars import get_args
from mindspeed_mm.training.arguments import Schema

if TYPE_CHECKING:
    from mindspeed_mm.training.callbacks import move_to_device
    from mindspeed_mm.training.script import pretrain, train

__all__ = ["Schema", "get_args", "move_to_device", "pretrain", "train"]

_LATER = {"move_to_device": "callbacks", "pretrain": "script", "train": "script"}


def __getattr__(name: str) -> Any:
    # Loaded at first use: options are read, and `--help` is shown, without torch.
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
