"""The FP8 API of transformer_engine on devices without FP8: always off, enabling it raises."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

from torch.distributed import ProcessGroup

from mindspeed import device
from mindspeed.te.common.recipe import Recipe


def refuse(what: str) -> NoReturn:
    """Raise for a request for FP8 or FP4, with the alternatives."""
    raise RuntimeError(
        f"{what} asks for FP8 or FP4, which mindspeed.te does not offer on "
        f"{device.current().name}: train in bf16 (leave --fp8-format, --fp8-param-gather and "
        "--fp4-format out), "
        "or install NVIDIA's transformer-engine on a GPU that has FP8"
    )


def check_fp8_support() -> tuple[bool, str]:
    """Return False and the reason: FP8 is not implemented here."""
    return False, f"mindspeed.te does not offer FP8 on {device.current().name}"


class FP8GlobalStateManager:
    """The FP8 state that Megatron queries at run time: disabled."""

    @staticmethod
    def is_fp8_available() -> tuple[bool, str]:
        """Return False and the reason."""
        return check_fp8_support()

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Return False: modules run in their own dtype."""
        return False

    @staticmethod
    def is_fp8_calibration() -> bool:
        """Return False: no scaling factors are calibrated."""
        return False

    @staticmethod
    def get_fp8_recipe() -> Recipe | None:
        """Return None: no recipe is active."""
        return None

    @staticmethod
    def get_fp8_group() -> ProcessGroup | None:
        """Return None: no process group reduces amax values."""
        return None


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: ProcessGroup | None = None,
    _graph: bool = False,
) -> AbstractContextManager[None]:
    """Return a null context; raise if FP8 is enabled."""
    if enabled or calibrating:
        refuse("fp8_autocast(enabled=True)")
    return nullcontext()


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: ProcessGroup | None = None,
    _graph: bool = False,
) -> AbstractContextManager[None]:
    """Return a null context; raise if quantization is enabled."""
    if enabled or calibrating:
        refuse("autocast(enabled=True)")
    return nullcontext()


def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> AbstractContextManager[None]:
    """Return a null context, so weights keep their dtype; raise if FP8 weights are requested."""
    if enabled:
        refuse("fp8_model_init(enabled=True)")
    return nullcontext()


def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> AbstractContextManager[None]:
    """Return a null context, so weights keep their dtype; raise if quantized weights are asked."""
    if enabled:
        refuse("quantized_model_init(enabled=True)")
    return nullcontext()
