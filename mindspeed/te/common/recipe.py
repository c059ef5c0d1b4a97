"""Quantization recipes as plain data: Megatron builds them, no kernel here reads them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class FormatLimits:
    """Largest finite values of a number format, forward and backward."""

    max_fwd: float
    max_bwd: float


_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
_E5M2_MAX = torch.finfo(torch.float8_e5m2).max
_E2M1_MAX = 6.0


class Format(enum.Enum):
    """Number formats of quantized tensors."""

    E2M1 = FormatLimits(_E2M1_MAX, _E2M1_MAX)
    E4M3 = FormatLimits(_E4M3_MAX, _E4M3_MAX)
    E5M2 = FormatLimits(_E5M2_MAX, _E5M2_MAX)
    HYBRID = FormatLimits(_E4M3_MAX, _E5M2_MAX)


class Recipe:
    """Base class of recipes."""

    def delayed(self) -> bool:
        """Return whether scaling factors come from the amax history of earlier steps."""
        return isinstance(self, DelayedScaling)


@dataclass
class DelayedScaling(Recipe):
    """Per-tensor scaling from the amax history of earlier steps."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    # Megatron passes the keywords of its modules, too; a recipe ignores them.
    params_dtype: torch.dtype | None = None
    device: Any = None


@dataclass
class Float8CurrentScaling(Recipe):
    """Per-tensor scaling from the current amax."""

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8BlockScaling(Recipe):
    """One scaling factor per block of a tensor."""

    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class MXFP8BlockScaling(Recipe):
    """One power-of-two scaling factor per 32 values."""

    fp8_format: Format = Format.E4M3
    margin: int = 0
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class NVFP4BlockScaling(Recipe):
    """FP4 values with one E4M3 scaling factor per 16 values."""

    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class CustomRecipe(Recipe):
    """Quantizers from a user-defined factory."""

    qfactory: Callable[..., Any]
    fp8_dpa: bool = False
    fp8_mha: bool = False
