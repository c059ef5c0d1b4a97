"""One linear layer for each of several groups of rows: the experts of this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.parallel.tensor import linear
from mindspeed.te.pytorch.module.base import TransformerEngineBaseModule, activation_dtype


class GroupedLinear(TransformerEngineBaseModule):
    """Multiply each group of rows by its own weight.

    It never talks to other ranks, sharded or not: Megatron's token dispatcher does that.
    """

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
        self.reset_parameters(defer_init=self._on_meta())

    def forward(
        self, x: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, list[Tensor] | None]:
        """Return y for x (rows, in), whose consecutive groups have m_splits rows."""
        rows = [int(count) for count in m_splits]
        if len(rows) != self.num_gemms or sum(rows) != x.shape[0]:
            raise ValueError(
                f"m_splits={rows} must give {self.num_gemms} counts that add up to the "
                f"{x.shape[0]} rows of the input"
            )
        x = x.to(activation_dtype(x, self.weight0))
        pieces = [self._product(index, piece) for index, piece in enumerate(x.split(rows))]
        out = torch.cat(pieces)
        if not self.return_bias:
            return out
        if not self.use_bias:
            return out, None
        return out, [self._bias(index).to(out.dtype) for index in range(self.num_gemms)]

    def _product(self, index: int, x: Tensor) -> Tensor:
        return linear(
            x,
            getattr(self, f"weight{index}"),
            self._bias(index) if self.use_bias and not self.return_bias else None,
            fused=self.fuse_wgrad_accumulation,
            deferred=self._deferred,
        )

    def _bias(self, index: int) -> Tensor:
        return getattr(self, f"bias{index}")

    def extra_repr(self) -> str:
        """Show sizes."""
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.use_bias}"
        )
