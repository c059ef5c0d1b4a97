"""One linear layer for each of several groups of rows: the experts of this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed.parallel.tensor import grouped_linear
from mindspeed.parallel.tensor.expert_mlp import ExpertMatrices
from mindspeed.te.pytorch.module.base import TransformerEngineBaseModule, activation_dtype


class GroupedLinear(TransformerEngineBaseModule):
    """Multiply each group of rows by its own weight.

    It never talks to other ranks, sharded or not: Megatron's token dispatcher does that.
    """

    weight0: nn.Parameter

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        init_method: Callable[[Tensor], Any] | None = None,
        rng_tracker_name: str | None = None,
        **options: Any,
    ) -> None:
        if rng_tracker_name is not None:
            self.rng_tracker_name = rng_tracker_name
        super().__init__(**options)
        self.num_gemms = num_gemms
        self.use_bias = bias
        self.return_bias = return_bias
        row = self.parallel_mode == "row"
        column = self.parallel_mode == "column"
        self.in_features = self._shard(in_features, "in_features") if row else in_features
        self.out_features = self._shard(out_features, "out_features") if column else out_features
        for index in range(num_gemms):
            self._add_weight(f"weight{index}", (self.out_features, self.in_features), init_method)
            if bias:
                self._add_bias(f"bias{index}", self.out_features)
        self._lay_together()
        # Megatron's buffers take parameters from the last to the first: so they lie in order there.
        self._parameters = dict(reversed(self._parameters.items()))
        self.reset_parameters(defer_init=self._on_meta())

    def forward(
        self, x: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, list[Tensor] | None]:
        """Return y for x (rows, in), whose consecutive groups have m_splits rows."""
        ends = self._ends(x, m_splits)
        x = x.to(activation_dtype(x, self.weight0))
        out = grouped_linear(
            x,
            self._parts("weight"),
            ends,
            bias=torch.stack(self._parts("bias"))
            if self.use_bias and not self.return_bias
            else None,
            fused=self.fuse_wgrad_accumulation,
            deferred=self._deferred,
        )
        if not self.return_bias:
            return out
        return out, [bias.to(out.dtype) for bias in self._parts("bias")] if self.use_bias else None

    def matrices(self) -> ExpertMatrices:
        """Return the weights and the delivery of their gradients, for a GEMM of the caller's."""
        return ExpertMatrices(self._parts("weight"), self.fuse_wgrad_accumulation, self._deferred)

    def _ends(self, x: Tensor, m_splits: Sequence[int] | Tensor) -> Tensor:
        """Return the end of each group on the device; counts that are there stay there."""
        if isinstance(m_splits, Tensor) and m_splits.device.type != "cpu":
            return m_splits.cumsum(0, dtype=torch.int32)
        rows = [int(count) for count in m_splits]
        if len(rows) != self.num_gemms or sum(rows) != x.shape[0]:
            raise ValueError(
                f"m_splits={rows} must give {self.num_gemms} counts that add up to the "
                f"{x.shape[0]} rows of the input"
            )
        ends = torch.tensor(list(accumulate(rows)), dtype=torch.int32)
        return ends.to(x.device, non_blocking=True)

    def _lay_together(self) -> None:
        """Put all weights side by side, so that the grouped GEMM needs no copy of them."""
        if self._on_meta():
            return
        block = self.weight0.data.new_empty(self.num_gemms, *self.weight0.shape)
        for weight, rows in zip(self._parts("weight"), block, strict=True):
            weight.data = rows

    def _parts(self, name: str) -> list[Tensor]:
        return [getattr(self, f"{name}{index}") for index in range(self.num_gemms)]

    def _gemms_per_forward(self) -> int:
        return 1

    def extra_repr(self) -> str:
        """Show sizes."""
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.use_bias}"
        )
