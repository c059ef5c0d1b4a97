"""What LayerNorm accepts, whichever implementation runs."""

from __future__ import annotations

from torch import Tensor


def check(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float = 1e-5) -> None:
    """Raise ValueError for parameters that do not fit x."""
    if not x.is_floating_point():
        raise ValueError(f"layer_norm needs floating-point numbers, got {x.dtype}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"layer_norm needs a {name} of shape {tuple(x.shape[-1:])} for x of shape "
                f"{tuple(x.shape)}, got {tuple(parameter.shape)}"
            )
