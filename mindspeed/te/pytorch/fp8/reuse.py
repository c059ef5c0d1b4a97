"""Functions that verl calls if fp8_reuse_quantized_weight is set; without FP8 they raise."""

from mindspeed.te.pytorch.fp8.switches import refuse

__all__ = ["clear_weight_quantization_reuse_cache", "set_weight_release_enabled"]

_OPTION = "fp8_reuse_quantized_weight"


def clear_weight_quantization_reuse_cache(release_storage: bool = False) -> None:
    """Raise: there is no cache of quantized weights."""
    refuse(_OPTION)


def set_weight_release_enabled(enabled: bool) -> None:
    """Raise: there are no quantized weights whose originals could be released."""
    refuse(_OPTION)
