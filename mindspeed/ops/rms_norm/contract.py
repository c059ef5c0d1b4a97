"""What RMSNorm accepts, whichever implementation runs."""

from __future__ import annotations

from torch import Tensor


def check_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> None:
    """Raise ValueError for a weight that does not fit x."""
    if not x.is_floating_point():
        raise ValueError(f"rms_norm needs floating-point numbers, got {x.dtype}")
    if gamma.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm needs a gamma of shape {tuple(x.shape[-1:])} for x of shape "
            f"{tuple(x.shape)}, got {tuple(gamma.shape)}"
        )


def check_add_rms_norm(x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> None:
    """Raise ValueError for a residual or a weight that does not fit x."""
    if residual.shape != x.shape:
        raise ValueError(
            f"add_rms_norm needs a residual of shape {tuple(x.shape)}, got {tuple(residual.shape)}"
        )
    check_rms_norm(x, gamma, epsilon)
