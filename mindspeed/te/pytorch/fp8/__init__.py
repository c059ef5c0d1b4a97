"""Low precision, which is off: the switches under the names Megatron imports."""

from mindspeed.te.pytorch.fp8.switches import (
    FP8GlobalStateManager,
    autocast,
    check_fp8_support,
    fp8_autocast,
    fp8_model_init,
    quantized_model_init,
    refuse,
)

__all__ = [
    "FP8GlobalStateManager",
    "autocast",
    "check_fp8_support",
    "fp8_autocast",
    "fp8_model_init",
    "quantized_model_init",
    "refuse",
]
