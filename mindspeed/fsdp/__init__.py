"""The FSDP2 engine: options name modules by pattern, a plan follows from them, torch shards."""

from typing import TYPE_CHECKING

from mindspeed.fsdp.options import FsdpOptions
from mindspeed.fsdp.patterns import Pattern, fold
from mindspeed.lazy_import import lazy_names

if TYPE_CHECKING:
    from mindspeed.fsdp.plan import Plan, Unit, make_plan
    from mindspeed.fsdp.sharding import Sharding, shard

__all__ = ["FsdpOptions", "Pattern", "Plan", "Sharding", "Unit", "fold", "make_plan", "shard"]

# Options are read, and `--help` is shown, without torch.
__getattr__ = lazy_names(
    __name__,
    {
        "Plan": "plan",
        "Sharding": "sharding",
        "Unit": "plan",
        "make_plan": "plan",
        "shard": "sharding",
    },
)
