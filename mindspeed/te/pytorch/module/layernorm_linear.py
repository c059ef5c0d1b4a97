"""Norm and linear layer in one module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from mindspeed.distributed.collectives import all_gather
from mindspeed.memory.recompute import Recompute, is_kept
from mindspeed.te.pytorch.module.base import activation_dtype
from mindspeed.te.pytorch.module.layernorm import add_rms_norm, layer_norm, rms_norm
from mindspeed.te.pytorch.module.linear import LinearBase

if TYPE_CHECKING:
    from mindspeed.te.fused_residual_norm import ResidualNorm


class LayerNormLinear(LinearBase):
    """y = norm(x) W^T + b; under sequence parallelism the norm works on this rank's tokens."""

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None
    residual_norm: ResidualNorm | None = None
    """Where the residual sum before this module computes the norm along with it."""
    recompute_norm = False
    """Keep the input of the norm, which its gradient needs anyway, and not its output."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization={normalization!r}: use 'LayerNorm' or 'RMSNorm'")
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        start = nn.init.zeros_ if zero_centered_gamma else nn.init.ones_
        self._add_norm_parameter("layer_norm_weight", start)
        if normalization == "LayerNorm":
            self._add_norm_parameter("layer_norm_bias", nn.init.zeros_)
        else:
            self.register_parameter("layer_norm_bias", None)
        self.reset_parameters(defer_init=self._on_meta())

    def forward(
        self, x: Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Return y, then the bias and the norm's output as far as they were asked for."""
        normed = self._gemm_input(x)
        with self._keeping(x, normed):
            out = self._gemm(normed)
        results: list[Tensor | None] = [out]
        if self.return_bias:
            results.append(self._returned_bias(out))
        if self.return_layernorm_output:
            gather = self.return_layernorm_output_gathered and self.sequence_parallel
            results.append(all_gather(normed, self._group()) if gather else normed)
        return out if len(results) == 1 else tuple(results)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the norm of x + residual and the sum, by one kernel; None where there is none."""
        if self.normalization != "RMSNorm":
            return None
        return add_rms_norm(x, residual, self.layer_norm_weight, self.eps, **self._types(x))

    def _gemm_input(self, x: Tensor) -> Tensor:
        normed = None if self.residual_norm is None else self.residual_norm.take(x)
        return self._norm(x, **self._types(x)) if normed is None else normed

    def _keeping(self, x: Tensor, gemm_input: Tensor) -> AbstractContextManager[None]:
        if not (self.recompute_norm and is_kept(gemm_input)):
            return nullcontext()
        return Recompute(partial(self._norm, **self._types(x)), x).of_output(gemm_input)

    def _norm(self, x: Tensor, **types: Any) -> Tensor:
        if self.normalization == "RMSNorm":
            return rms_norm(x, self.layer_norm_weight, self.eps, **types)
        bias = cast("Tensor", self.layer_norm_bias)  # None only for RMSNorm
        return layer_norm(x, self.layer_norm_weight, bias, self.eps, **types)

    def _types(self, x: Tensor) -> dict[str, Any]:
        dtype = activation_dtype(x, self.layer_norm_weight)
        return {"zero_centered": self.zero_centered_gamma, "dtype": dtype}

    def _add_norm_parameter(self, name: str, start: Callable[[Tensor], Any]) -> None:
        size = self.in_features
        param: Any = self._add_parameter(name, (size,), start)
        param.sequence_parallel = self.sequence_parallel
