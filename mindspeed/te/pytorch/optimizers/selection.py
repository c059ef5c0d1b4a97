"""The optimizer that `--optimizer-selection` names, in the place of the one Megatron imported."""

from __future__ import annotations

import functools
from typing import Any

from mindspeed.te.pytorch.optimizers.fused_ema_adam import FusedEmaAdam
from mindspeed.te.pytorch.optimizers.torch_adam import TorchFusedAdam


def select_adam(original: type, selection: str, ema_decay: float) -> type:
    """Return the class that Megatron's `get_megatron_optimizer` shall build as Adam."""
    if selection == "fused_torch_adamw":
        return TorchFusedAdam
    if selection == "fused_ema_adamw":
        return _with_decay(ema_decay)
    return original


@functools.cache
def _with_decay(ema_decay: float) -> type:
    # A class, as Megatron tests for one.
    def build(self: FusedEmaAdam, *args: Any, **kwargs: Any) -> None:
        FusedEmaAdam.__init__(self, *args, ema_decay=ema_decay, **kwargs)

    return type("FusedEmaAdam", (FusedEmaAdam,), {"__init__": build})
