"""What verl calls where fp8_reuse_quantized_weight is set; there are no such weights here."""

from mindspeed.te.pytorch.fp8.switches import refuse

__all__ = ["clear_weight_quantization_reuse_cache", "set_weight_release_enabled"]

_OPTION = "fp8_reuse_quantized_weight"


def clear_weight_quantization_reuse_cache(release_storage: bool = False) -> None:
    """Say that no quantised weight is kept, and what to do."""
    refuse(_OPTION)


def set_weight_release_enabled(enabled: bool) -> None:
    """Say that no weight is released in favour of a quantised one, and what to do."""
    refuse(_OPTION)
