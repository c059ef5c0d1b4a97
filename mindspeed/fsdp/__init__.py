"""The FSDP2 engine: options name modules by pattern, a plan follows from them, torch shards."""

import importlib
from typing import TYPE_CHECKING, Any

from mindspeed.fsdp.options import FsdpOptions
from mindspeed.fsdp.patterns import Pattern, fold

if TYPE_CHECKING:
    from mindspeed.fsdp.plan import Plan, Unit, make_plan
    from mindspeed.fsdp.sharding import Sharding, shard

__all__ = ["FsdpOptions", "Pattern", "Plan", "Sharding", "Unit", "fold", "make_plan", "shard"]

_LATER = {
    "Plan": "plan",
    "Sharding": "sharding",
    "Unit": "plan",
    "make_plan": "plan",
    "shard": "sharding",
}


def __getattr__(name: str) -> Any:
    # Loaded at first use: options are read, and `--help` is shown, without torch.
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
