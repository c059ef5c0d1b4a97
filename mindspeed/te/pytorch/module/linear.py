"""Linear layer, whole or as a column- or row-parallel shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed.distributed.collectives import all_reduce, copy_to_group, reduce_scatter
from mindspeed.ops.dispatch import is_tracing
from mindspeed.ops.swiglu import gemm_swiglu, swiglu
from mindspeed.parallel.tensor import (
    BufferedWeight,
    FrozenWeight,
    linear,
    linear_swiglu,
    low_rank_linear,
    low_rank_linear_swiglu,
    low_rank_swiglu_linear,
    swiglu_linear,
)
from mindspeed.te.pytorch.module.base import TransformerEngineBaseModule, activation_dtype


class _Operands(NamedTuple):
    x: Tensor
    weight: Tensor
    factors: tuple[Tensor, Tensor] | None
    """Low-rank factors beside a frozen weight."""
    gather_group: ProcessGroup | None


class LinearBase(TransformerEngineBaseModule):
    """Weight, bias and GEMM of a linear layer; what precedes the GEMM is the subclass's."""

    low_rank: Callable[[], tuple[Tensor, Tensor] | None] | None = None
    """Where a trained A (rank, in) and B (out, rank) come beside a frozen weight: returns this
    rank's shards of both, or None to leave them out. B of a row shard and A of a column shard are
    whole."""
    _buffered: BufferedWeight | None = None
    """The weight where it was put for them."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        init_method: Callable[[Tensor], Any] | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        row = self.parallel_mode == "row"
        column = self.parallel_mode == "column"
        self.in_features = self._shard(in_features, "in_features") if row else in_features
        self.out_features = self._shard(out_features, "out_features") if column else out_features
        self._parts = self._split(parameters_split, out_features)
        for prefix, size in self._parts.items():
            self._add_weight(f"{prefix}weight", (size, self.in_features), init_method)
            if bias:
                self._add_bias(f"{prefix}bias", size)
        if not bias:
            self.register_parameter("bias", None)

    def _split(self, parts: Sequence[str] | Mapping[str, int] | None, total: int) -> dict[str, int]:
        """Return name prefix -> rows on this rank for each parameter that makes up the weight."""
        if parts is None:
            return {"": self.out_features}
        if self.fuse_wgrad_accumulation or self._deferred is not None:
            raise ValueError(
                "parameters_split works with neither fuse_wgrad_accumulation nor "
                "delay_wgrad_compute: turn those off or keep one weight"
            )
        if not isinstance(parts, Mapping):
            if total % len(parts):
                raise ValueError(f"out_features={total} does not split into {len(parts)} parts")
            parts = dict.fromkeys(parts, total // len(parts))
        if sum(parts.values()) != total:
            raise ValueError(f"parameters_split {dict(parts)} does not add up to {total}")
        if self.parallel_mode != "column":
            return dict(parts)
        return {name: self._shard(size, name) for name, size in parts.items()}

    def _whole(self, name: str) -> Tensor:
        """Return the weight or the bias in one piece."""
        parts = [getattr(self, f"{prefix}{name}") for prefix in self._parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gemm(self, x: Tensor) -> Tensor:
        """Multiply by the weight and reduce over the tensor-parallel group."""
        return self._reduce(self._multiply(self._operands(x)))

    def _operands(self, x: Tensor) -> _Operands:
        weight = self._whole("weight")
        group = self._group()
        column = self.parallel_mode == "column"
        if column and not self.sequence_parallel:
            x = copy_to_group(x, group)
        x = x.to(activation_dtype(x, weight))
        gather_group = group if column and self.sequence_parallel else None
        factors = None if self.low_rank is None else self.low_rank()
        if factors is not None:
            factors = self._shared(*factors)
        return _Operands(x, weight, factors, gather_group)

    def _multiply(self, operands: _Operands) -> Tensor:
        x, weight, factors, group = operands
        row = self.parallel_mode == "row"
        bias = self._whole("bias") if self.apply_bias and not row else None
        if factors is not None:
            frozen = self._frozen(weight, factors[0])
            return low_rank_linear(x, frozen, bias, *factors, gather_group=group)
        return linear(x, weight, bias, gather_group=group, **self._wgrad_options())

    def _frozen(self, weight: Tensor, inner: Tensor) -> FrozenWeight:
        """Return the weight for a GEMM with factors; the first time, it is moved beside them."""
        if is_tracing() or weight.requires_grad or len(self._parts) > 1:
            return FrozenWeight(weight)
        # Loading, a move to another device or a new dtype may have replaced its memory since.
        if self._buffered is None or not self._buffered.holds(weight, len(inner)):
            self._buffered = BufferedWeight(weight, len(inner))
        return self._buffered

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LinearBase:
        self._buffered = None  # a moved weight leaves its buffer
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the buffer out of copies and pickles: they have the weight itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_buffered"}

    def _wgrad_options(self) -> dict[str, Any]:
        return {"fused": self.fuse_wgrad_accumulation, "deferred": self._deferred}

    def _reduce(self, out: Tensor) -> Tensor:
        if self.parallel_mode != "row":
            return out
        reduce = reduce_scatter if self.sequence_parallel else all_reduce
        out = reduce(out, self._group())
        return out + self._whole("bias").to(out.dtype) if self.apply_bias else out

    def _shared(self, inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
        """Sum the gradients of the factor that is whole: each rank has a part of them."""
        if self.parallel_mode == "column":
            return copy_to_group(inner, self._group()), outer
        if self.parallel_mode == "row":
            return inner, copy_to_group(outer, self._group())
        return inner, outer

    def linear_swiglu(self, x: Tensor, *, in_epilogue: bool) -> tuple[Tensor | None, Tensor]:
        """Return the output of `forward`, without bias, as a pre-activation, and its SwiGLU.

        `in_epilogue` allows the GEMM to compute SwiGLU where a kernel does; gate and up of the
        pre-activation are interleaved then, (..., F, 2), or it is None as no backward needs it.
        """
        gemm_input = self._gemm_input(x)
        with self._keeping(x, gemm_input):
            return self._linear_swiglu(self._operands(gemm_input), in_epilogue)

    def _linear_swiglu(
        self, operands: _Operands, in_epilogue: bool
    ) -> tuple[Tensor | None, Tensor]:
        x, weight, factors, group = operands
        rank = 0 if factors is None else len(factors[0])
        if not (in_epilogue and gemm_swiglu.is_supported(x, weight, rank)):
            out = self._multiply(operands)
            return out, swiglu(out)
        if factors is None:
            preact, y = linear_swiglu(x, weight, gather_group=group, **self._wgrad_options())
        else:
            frozen = self._frozen(weight, factors[0])
            preact, y = low_rank_linear_swiglu(x, frozen, *factors, gather_group=group)
        return preact, y if preact is None else gemm_swiglu.with_gradient(y, preact)

    def swiglu_linear(self, preact: Tensor | None, activated: Tensor) -> Tensor:
        """Return the output of `forward`, without bias, for activated = swiglu(preact).

        Backward recomputes the activation where nothing changes it before the GEMM. Without
        `preact`, `activated` is an input like any other.
        """
        operands = self._operands(activated)
        x, weight, factors, group = operands
        is_unchanged = x is activated and group is None
        if preact is None or not (is_unchanged and preact.requires_grad):
            out = self._multiply(operands)
        elif factors is None:
            out = swiglu_linear(preact, activated, weight, **self._wgrad_options())
        else:
            frozen = self._frozen(weight, factors[0])
            out = low_rank_swiglu_linear(preact, activated, frozen, *factors)
        return self._reduce(out)

    def _gemm_input(self, x: Tensor) -> Tensor:
        """Return what the GEMM takes of the input of `forward`."""
        return x

    def _keeping(self, x: Tensor, gemm_input: Tensor) -> AbstractContextManager[None]:
        """Return the context for the GEMM, in which autograd keeps its input for backward."""
        return nullcontext()

    def _returned_bias(self, out: Tensor) -> Tensor | None:
        return self._whole("bias").to(out.dtype) if self.use_bias else None

    def extra_repr(self) -> str:
        """Show sizes and sharding."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, parallel_mode={self.parallel_mode}, tp_size={self.tp_size}"
        )


class Linear(LinearBase):
    """y = x W^T + b; a column-parallel shard yields part of y, a row-parallel one all of it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rng_tracker_name: str | None = None,
        **options: Any,
    ) -> None:
        if rng_tracker_name is not None:
            self.rng_tracker_name = rng_tracker_name
        super().__init__(in_features, out_features, **options)
        self.reset_parameters(defer_init=self._on_meta())

    def forward(
        self, x: Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return y, or y without bias and the bias where return_bias asks for it."""
        out = self._gemm(x)
        return (out, self._returned_bias(out)) if self.return_bias else out
