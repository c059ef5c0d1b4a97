"""Norms of Megatron's local layer specs, where Megatron refuses or takes another spec's norm.

WrappedTorchNorm refuses sequence parallelism, zero-centred gamma and the persist flag;
`wrap_torch_norm` serves them. The final norm of a block of local layers is Transformer Engine's
when that is there, and of a mixture's block apex' LayerNorm when that is there, whatever the model
is normalised by; `wrap_block_submodules` makes it the norm of the layers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class _MarkedNorm(nn.Module):
    zero_centered_gamma: bool

    def adopt(self, config: Any) -> nn.Module:
        """Take over what Megatron's config says about norms."""
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        if self.zero_centered_gamma:
            nn.init.zeros_(self.weight)
        for param in self.parameters():
            # Each rank norms a part of the sequence: Megatron sums gradients with this mark.
            param.sequence_parallel = config.sequence_parallel
        return self

    def gamma(self) -> Tensor:
        """Return the factor itself, which may be stored less one."""
        return self.weight + 1 if self.zero_centered_gamma else self.weight


class LayerNorm(_MarkedNorm, nn.LayerNorm):
    """torch's LayerNorm, for a part of the sequence too."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x."""
        weight, bias = self.gamma().to(x.dtype), self.bias.to(x.dtype)
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(_MarkedNorm, nn.RMSNorm):
    """torch's RMSNorm, for a part of the sequence too."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x."""
        weight = self.gamma().to(x.dtype)
        return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)


def wrap_torch_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `WrappedTorchNorm.__new__` build norms that sequence parallelism can use."""
    norms = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}

    @functools.wraps(original)
    def build(
        cls: type,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> nn.Module:
        # The last three are unused upstream too; the config decides. Its persist and
        # memory-efficient flags choose a CUDA kernel and change no number.
        norm = norms.get(config.normalization)
        if norm is None:
            return original(cls, config, hidden_size, eps)
        return norm(hidden_size, eps=eps).adopt(config)

    return build


def wrap_block_submodules(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `_get_block_submodules` end a block of local layers with the norm of those layers."""

    @functools.wraps(original)
    def submodules(config: Any, spec: Any, *args: Any, **kwargs: Any) -> Any:
        block = original(config, spec, *args, **kwargs)
        norm = getattr(getattr(spec, "submodules", None), "input_layernorm", None)
        norm = norm if _is_local(norm) else _other_than_apex(block.layer_norm, config)
        return dataclasses.replace(block, layer_norm=norm)

    return submodules


def _other_than_apex(norm: Any, config: Any) -> Any:
    """Return torch's norm where apex' has no such kind, as Megatron does without apex."""
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    is_refused = norm is FusedLayerNorm and config.normalization != "LayerNorm"
    return WrappedTorchNorm if is_refused else norm


def _is_local(norm: Any) -> bool:
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return norm is FusedLayerNorm or norm is WrappedTorchNorm
