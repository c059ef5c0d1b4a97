"""Stand-in for megatron.training where only megatron-core is installed."""

from typing import TYPE_CHECKING, Any

from mindspeed.compat.stand_ins.megatron_training.global_vars import get_args

if TYPE_CHECKING:
    from mindspeed.compat.stand_ins.megatron_training.training import get_model

__all__ = ["get_args", "get_model"]


def __getattr__(name: str) -> Any:
    # Loaded at first use: who asks for the arguments alone need not import Megatron.
    if name != "get_model":
        raise AttributeError(
            f"megatron.training is not installed and its stand-in has no {name}, only "
            f"{' and '.join(__all__)}: put a checkout of Megatron-LM on PYTHONPATH"
        )
    from mindspeed.compat.stand_ins.megatron_training import training

    return training.get_model
