"""The FP8 switches. They say "off", and asking for "on" is an error that says what to do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

from torch.distributed import ProcessGroup

from mindspeed import device
from mindspeed.te.common.recipe import Recipe


def refuse(what: str) -> NoReturn:
    """Say that low precision is not to be had on this device, and what to do."""
    raise RuntimeError(
        f"{what} asks for FP8 or FP4, which mindspeed.te does not offer on "
        f"{device.current().name}: train in bf16 (leave --fp8-format, --fp8-param-gather and "
        "--fp4-format out), "
        "or install NVIDIA's transformer-engine on a GPU that has FP8"
    )


def check_fp8_support() -> tuple[bool, str]:
    """Say no, and why."""
    return False, f"mindspeed.te does not offer FP8 on {device.current().name}"


class FP8GlobalStateManager:
    """What Megatron asks about FP8 at run time."""

    @staticmethod
    def is_fp8_available() -> tuple[bool, str]:
        """Say no, and why."""
        return check_fp8_support()

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Say no."""
        return False

    @staticmethod
    def is_fp8_calibration() -> bool:
        """Say no."""
        return False

    @staticmethod
    def get_fp8_recipe() -> Recipe | None:
        """There is none."""
        return None

    @staticmethod
    def get_fp8_group() -> ProcessGroup | None:
        """There is none."""
        return None


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: ProcessGroup | None = None,
    _graph: bool = False,
) -> AbstractContextManager[None]:
    """Do nothing where FP8 is off; refuse to turn it on."""
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
    """Do nothing where quantisation is off; refuse to turn it on."""
    if enabled or calibrating:
        refuse("autocast(enabled=True)")
    return nullcontext()


def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> AbstractContextManager[None]:
    """Build modules with ordinary weights; refuse to build FP8 ones."""
    if enabled:
        refuse("fp8_model_init(enabled=True)")
    return nullcontext()


def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> AbstractContextManager[None]:
    """Build modules with ordinary weights; refuse to build quantised ones."""
    if enabled:
        refuse("quantized_model_init(enabled=True)")
    return nullcontext()
