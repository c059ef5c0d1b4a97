"""The FSDP2 engine: options name modules by pattern, a plan follows from them, torch shards."""

from mindspeed.fsdp.options import FsdpOptions
from mindspeed.fsdp.patterns import Pattern, fold
from mindspeed.fsdp.plan import Plan, Unit, make_plan
from mindspeed.fsdp.sharding import Sharding, shard

__all__ = ["FsdpOptions", "Pattern", "Plan", "Sharding", "Unit", "fold", "make_plan", "shard"]
