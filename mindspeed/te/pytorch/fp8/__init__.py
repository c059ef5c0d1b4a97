"""The FP8 API that Megatron imports from transformer_engine; FP8 is disabled here."""

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
