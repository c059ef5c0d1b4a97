"""LayerNorm with Megatron's parameter marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed import device as devices
from mindspeed.te.pytorch.module.base import activation_dtype, materialised
from mindspeed.te.pytorch.module.normalize import layer_norm


class Norm(nn.Module):
    """Parameters of a norm over the last dimensions; a subclass says what is computed."""

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
