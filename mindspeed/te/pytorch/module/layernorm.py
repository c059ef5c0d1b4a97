"""LayerNorm and RMSNorm with Megatron's parameter marks, gamma stored as it is or minus one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mindspeed import device as devices
from mindspeed.ops.norm import add_rms_norm as plain_add_rms_norm
from mindspeed.ops.norm import layer_norm as plain_layer_norm
from mindspeed.ops.norm import rms_norm as plain_rms_norm
from mindspeed.te.pytorch.module.base import activation_dtype, materialised

if TYPE_CHECKING:
    from mindspeed.te.fused_residual_norm import ResidualNorm


class Norm(nn.Module):
    """Parameters of a norm over the last dimensions; a subclass defines what is computed."""

    has_bias: bool
    weight: nn.Parameter

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        *,
        hidden_size: int | Sequence[int] | None = None,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        shape = hidden_size if normalized_shape is None else normalized_shape
        if shape is None:
            raise TypeError(f"{type(self).__name__} needs normalized_shape (or hidden_size)")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        device = devices.current().torch_device if device is None else device
        dtype = params_dtype or torch.get_default_dtype()
        for name in ("weight", "bias") if self.has_bias else ("weight",):
            param = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
            # Under sequence parallelism each rank sees a part of the tokens: Megatron sums the
            # gradients of the parameters that carry this mark.
            param.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
            self.register_parameter(name, param)
        self.reset_parameters(defer_init=self.weight.is_meta)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise as the identity on a real device, unless that is deferred."""
        if defer_init:
            return
        for name, param in list(self.named_parameters(recurse=False)):
            real = materialised(param) if param.is_meta else param
            setattr(self, name, real)
            nn.init.constant_(real, float(name == "weight" and not self.zero_centered_gamma))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Some versions of Transformer Engine write an empty extra state for norms.
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Show shape and options."""
        shape = tuple(self.weight.shape)
        return f"{shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(Norm):
    """Layer norm, computed in float32 at least."""

    has_bias = True
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimensions of x."""
        return layer_norm(
            x,
            self.weight,
            self.bias,
            self.eps,
            zero_centered=self.zero_centered_gamma,
            dtype=activation_dtype(x, self.weight),
        )


class RMSNorm(Norm):
    """Root-mean-square norm, computed in float32 at least."""

    has_bias = False
    residual_norm: ResidualNorm | None = None
    """Where the residual sum before this module computes the norm along with it."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimensions of x."""
        normed = None if self.residual_norm is None else self.residual_norm.take(x)
        return rms_norm(x, self.weight, self.eps, **self._types(x)) if normed is None else normed

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the norm of x + residual and the sum, by one kernel; None where there is none."""
        return add_rms_norm(x, residual, self.weight, self.eps, **self._types(x))

    def _types(self, x: Tensor) -> dict[str, Any]:
        dtype = activation_dtype(x, self.weight)
        return {"zero_centered": self.zero_centered_gamma, "dtype": dtype}


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    zero_centered: bool,
    dtype: torch.dtype,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * gamma + bias, rounded once, to `dtype`."""
    x = _wide_enough(x, dtype)
    weight = _gamma(weight, x, zero_centered)
    return plain_layer_norm(x, weight, bias, eps).to(dtype)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool, dtype: torch.dtype
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gamma, rounded once, to `dtype`."""
    x = _wide_enough(x, dtype)
    return plain_rms_norm(x, _gamma(weight, x, zero_centered), eps).to(dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    zero_centered: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor] | None:
    """Return rms_norm(x + residual) and the sum, or None where types would change between them."""
    if not x.dtype == residual.dtype == dtype:
        return None
    return plain_add_rms_norm(x, residual, _gamma(weight, x, zero_centered), eps)


def _wide_enough(x: Tensor, dtype: torch.dtype) -> Tensor:
    # The operators return the dtype of x: it must not be the narrower one.
    return x.to(torch.promote_types(x.dtype, dtype))


def _gamma(weight: Tensor, x: Tensor, zero_centered: bool) -> Tensor:
    if not zero_centered:
        return weight
    # 1 + gamma needs the digits.
    return weight.to(torch.promote_types(x.dtype, torch.float32)) + 1
