"""Operations that Megatron strings together when it builds an MLP or a norm from parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mindspeed.distributed.collectives import (
    all_reduce,
    copy_to_group,
    group_size,
    reduce_scatter,
)
from mindspeed.parallel.tensor import linear
from mindspeed.te.pytorch.module.base import activation_dtype
from mindspeed.te.pytorch.module.layernorm import LayerNorm as LayerNormModule
from mindspeed.te.pytorch.module.layernorm import RMSNorm as RMSNormModule


class FusibleOperation(nn.Module):
    """One operation of a Sequential."""


class MakeExtraOutput(FusibleOperation):
    """Return what passes through here a second time, behind the result of the Sequential."""

    def forward(self, x: Tensor) -> Tensor:
        """Let x pass."""
        return x


class Sequential(nn.Sequential):
    """Operations in order; returns (result, *extra outputs) where there are extra outputs."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run all operations."""
        extra = []
        for operation in self:
            x = operation(x)
            if isinstance(operation, MakeExtraOutput):
                extra.append(x)
        return (x, *extra) if extra else x


class LayerNorm(LayerNormModule, FusibleOperation):
    """Layer norm."""

    def __init__(self, normalized_shape: Any, *, dtype: torch.dtype | None = None, **options: Any):
        super().__init__(normalized_shape, params_dtype=dtype, **options)


class RMSNorm(RMSNormModule, FusibleOperation):
    """Root-mean-square norm."""

    def __init__(self, normalized_shape: Any, *, dtype: torch.dtype | None = None, **options: Any):
        super().__init__(normalized_shape, params_dtype=dtype, **options)


class BasicLinear(FusibleOperation):
    """x W^T without bias; a row-parallel shard leaves the sum over ranks to the next operation."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if userbuffers_options is not None:
            raise ValueError(
                "userbuffers need NVIDIA's Transformer Engine: set tp_comm_overlap=False"
            )
        self.column = tensor_parallel_mode == "column"
        self.group = tensor_parallel_group
        self.sequence_parallel = sequence_parallel
        self.accumulate_into_main_grad = accumulate_into_main_grad
        shard = out_features // group_size(self.group) if self.column else out_features
        self.weight = nn.Parameter(torch.empty(shard, in_features, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight."""
        gather = self.column and self.sequence_parallel
        if self.column and not gather:
            x = copy_to_group(x, self.group)
        return linear(
            x.to(activation_dtype(x, self.weight)),
            self.weight,
            gather_group=self.group if gather else None,
            fused=self.accumulate_into_main_grad,
        )


class Bias(FusibleOperation):
    """Add a vector."""

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Add the bias."""
        return x + self.bias.to(x.dtype)


class ReduceScatter(FusibleOperation):
    """Sum over ranks and keep this rank's part of the sequence."""

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = process_group

    def forward(self, x: Tensor) -> Tensor:
        """Sum and scatter."""
        return reduce_scatter(x, self.group)


class AllReduce(FusibleOperation):
    """Sum over ranks."""

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = process_group

    def forward(self, x: Tensor) -> Tensor:
        """Sum."""
        return all_reduce(x, self.group)


class _Activation(FusibleOperation):
    """An activation function, gated by the second half of the last dimension or not."""

    function: Callable[[Tensor], Tensor]
    gated = False

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        if cache_quantized_input:
            raise ValueError(
                "no FP8 copy of the input is kept here: leave activation_func_fp8_input_store out"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function."""
        if not self.gated:
            return type(self).function(x)
        activated, gate = x.chunk(2, dim=-1)
        return type(self).function(activated) * gate


class GELU(_Activation):
    """GELU, exact as in Megatron's own MLP."""

    function = staticmethod(F.gelu)


class ReLU(_Activation):
    """ReLU."""

    function = staticmethod(F.relu)


class SiLU(_Activation):
    """SiLU."""

    function = staticmethod(F.silu)


class GEGLU(GELU):
    """GELU of one half times the other."""

    gated = True


class ReGLU(ReLU):
    """ReLU of one half times the other."""

    gated = True


class SwiGLU(SiLU):
    """SiLU of one half times the other."""

    gated = True
