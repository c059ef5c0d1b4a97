"""Grouped GEMM in plain torch, one matmul per group, and what all implementations share.

M rows in E groups, K and N columns. `ends` (E,) int32 holds the end of each group's rows.
group_type 0 groups rows: x (M, K), weight (E, K, N) -> (M, N). group_type 2 groups the dimension
that is summed over: x (K, M), weight (M, N) -> (E * K, N), one (K, N) result per group.
group_type -1 has no groups: equally long lists of matrices, one matmul each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed.ops.groupmatmul_add_fp32 import groupmatmul_add_fp32
from mindspeed.ops.matmul_add_fp32.main_grad import placeholder

GroupList = Tensor | Sequence[int] | None
Matrices = Tensor | Sequence[Tensor]
_ONES = 8  # the shortest row that is aligned for every implementation


class Kernels(NamedTuple):
    """The two grouped GEMMs that the operator and its gradients consist of."""

    rows: Callable[[Tensor, Tensor, Tensor], Tensor]
    """x (M, K), weight (E, K, N), ends -> (M, N)"""
    outer: Callable[[Tensor, Tensor, Tensor], Tensor]
    """x (M, K), y (M, N), ends -> (E, K, N), zeros for empty groups"""


class Grouping(NamedTuple):
    """The groups as the caller gave them, and where the gradient of the weight goes."""

    group_list: GroupList
    is_cumulative: bool
    group_type: int
    original_weight: Tensor | None

    def ends(self, device: torch.device) -> Tensor:
        """Return the ends of the groups on the device, without synchronising with it."""
        groups = self.group_list
        if not isinstance(groups, Tensor):
            groups = torch.tensor(groups, dtype=torch.int32)
        groups = groups.to(device, non_blocking=True)
        return (groups if self.is_cumulative else groups.cumsum(0)).to(torch.int32)


def make_operators(kernels: Kernels) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return gmm, whose group_list holds ends, and gmm_v2, whose group_list holds sizes."""

    def make(is_cumulative: bool) -> Callable[..., Any]:
        def multiply(
            x: Matrices,
            weight: Matrices,
            *,
            bias: Matrices | None = None,
            group_list: GroupList = None,
            group_type: int = 0,
            gemm_fusion: bool = False,
            original_weight: Tensor | None = None,
        ) -> Any:
            """Multiply each group by its own matrix.

            Args:
                x: (M, K); with group_type 2 (K, M); with -1 a list of matrices.
                weight: (E, K, N); with group_type 2 (M, N); with -1 a list of matrices.
                bias: (E, N), added to the rows of each group.
                group_list: E numbers, a list or a tensor on any device; no host synchronisation.
                group_type: -1 no groups, 0 groups of rows, 2 groups of the summed dimension.
                gemm_fusion: add the gradient of weight to `original_weight.main_grad` in float32.
                original_weight: the parameter that weight is a view of.
            """
            main_weight = original_weight if gemm_fusion else None
            grouping = Grouping(group_list, is_cumulative, group_type, main_weight)
            return _grouped_matmul(kernels, x, weight, bias, grouping)

        return multiply

    return make(True), make(False)


def _grouped_matmul(
    kernels: Kernels, x: Matrices, weight: Matrices, bias: Matrices | None, grouping: Grouping
) -> Any:
    if grouping.group_type == -1:
        return _matmul_each(x, weight, bias)
    assert isinstance(x, Tensor), "check() allows lists for group_type -1 only"
    ends = grouping.ends(x.device)
    if grouping.group_type == 2:
        return _ColumnGroups.apply(x, weight, ends, kernels).flatten(0, 1)
    return _RowGroups.apply(x, weight, bias, ends, kernels, grouping.original_weight)


def _matmul_each(x: Any, weight: Any, bias: Any) -> Any:
    """Multiply two tensors, or two lists of them pairwise."""
    if isinstance(x, Tensor):
        out = x @ weight
        return out if bias is None else out + bias
    biases = [0.0] * len(x) if bias is None else bias
    return [one @ matrix + add for one, matrix, add in zip(x, weight, biases, strict=True)]


class _RowGroups(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ends: Tensor,
        kernels: Kernels,
        original_weight: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.kernels, ctx.original_weight = kernels, original_weight
        out = kernels.rows(x, weight, ends)
        if bias is None:
            return out
        rows = torch.arange(len(x), device=ends.device, dtype=ends.dtype)
        return out.add_(bias.index_select(0, torch.searchsorted(ends, rows, right=True)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.kernels.rows(grad, weight.transpose(1, 2), ends)
        if ctx.needs_input_grad[1]:
            if ctx.original_weight is None:
                grad_weight = ctx.kernels.outer(x, grad, ends)
            else:
                groupmatmul_add_fp32(x, grad, ends, ctx.original_weight.main_grad)
                grad_weight = placeholder(ctx.original_weight, like=weight)
        if ctx.needs_input_grad[2]:
            # The sum of a group's rows as a GEMM with ones: no atomics, so bitwise reproducible.
            ones = grad.new_ones(len(grad), _ONES)
            grad_bias = ctx.kernels.outer(ones, grad, ends)[:, 0]
        return grad_x, grad_weight, grad_bias, None, None, None


class _ColumnGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, ends: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(x, y, ends)
        ctx.kernels = kernels
        return kernels.outer(x.t(), y, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, ends = ctx.saved_tensors
        grad_x = grad_y = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.kernels.rows(y, grad.transpose(1, 2), ends).t()
        if ctx.needs_input_grad[1]:
            grad_y = ctx.kernels.rows(x.t(), grad, ends)
        return grad_x, grad_y, None, None


# The loops read the sizes of the groups on the host, which a compiler cannot trace: each is one
# custom op for it.
@torch.library.custom_op("mindspeed::grouped_rows", mutates_args=())
def rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows (M, K) by its matrix of weight (E, K, N)."""
    bounds = [0, *ends.tolist()]
    if bounds != sorted(bounds) or bounds[-1] != len(x):
        raise ValueError(
            f"gmm was given groups that end at {bounds[1:]} for {len(x)} rows: the ends must not "
            "fall and the last must be the number of rows"
        )
    out = x.new_empty(len(x), weight.shape[2])
    for (start, end), matrix in zip(pairwise(bounds), weight, strict=True):
        torch.mm(x[start:end], matrix, out=out[start:end])
    return out


@rows.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("mindspeed::grouped_outer", mutates_args=())
def outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows x^T (K, m) by the same rows of y (m, N): (E, K, N)."""
    bounds = [0, *ends.tolist()]
    out = x.new_empty(len(ends), x.shape[1], y.shape[1])
    for (start, end), result in zip(pairwise(bounds), out, strict=True):
        torch.mm(x[start:end].t(), y[start:end], out=result)
    return out


@outer.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1])


LOOP = Kernels(rows, outer)
gmm, gmm_v2 = make_operators(LOOP)


def check(
    x: Any,
    weight: Any,
    *,
    bias: Any = None,
    group_list: GroupList = None,
    group_type: int = 0,
    gemm_fusion: bool = False,
    original_weight: Tensor | None = None,
) -> None:
    """Raise ValueError for arguments that no implementation supports."""
    if group_type not in (-1, 0, 2):
        raise ValueError(
            f"gmm was given group_type={group_type}: use -1 (no groups), 0 (groups of rows) or "
            "2 (groups of the summed dimension)"
        )
    if gemm_fusion and (group_type != 0 or getattr(original_weight, "main_grad", None) is None):
        raise ValueError(
            "gemm_fusion adds the gradient of a group_type=0 weight to original_weight.main_grad: "
            "pass the parameter that has one, or gemm_fusion=False"
        )
    if group_type == -1:
        _check_lists(x, weight, bias, group_list)
        return
    dims = (2, 3) if group_type == 0 else (2, 2)
    given_dims = [getattr(value, "ndim", "list") for value in (x, weight)]
    if tuple(given_dims) != dims:
        raise ValueError(
            f"gmm with group_type={group_type} multiplies tensors of {dims[0]} and {dims[1]} "
            f"dimensions, got {given_dims[0]} and {given_dims[1]}"
        )
    if x.shape[1] != weight.shape[-2] or x.dtype != weight.dtype:
        raise ValueError(
            f"gmm cannot multiply {tuple(x.shape)} of {x.dtype} by {tuple(weight.shape)} of "
            f"{weight.dtype}"
        )
    _check_groups(weight, bias, group_list, group_type)


def _check_lists(
    x: Matrices, weight: Matrices, bias: Matrices | None, group_list: GroupList
) -> None:
    if group_list is not None:
        raise ValueError("gmm with group_type=-1 has no groups: drop group_list")
    parts = [value for value in (x, weight, bias) if value is not None]
    if len({isinstance(value, Tensor) for value in parts}) > 1:
        raise ValueError("gmm with group_type=-1 needs tensors or lists, not some of each")
    if not isinstance(x, Tensor) and len({len(value) for value in parts}) > 1:
        raise ValueError(
            f"gmm with group_type=-1 needs lists of one length, got {[len(v) for v in parts]}"
        )


def _check_groups(
    weight: Tensor, bias: Tensor | None, group_list: GroupList, group_type: int
) -> None:
    if group_list is None:
        raise ValueError(f"gmm with group_type={group_type} needs a group_list")
    if isinstance(group_list, Tensor) and (
        group_list.ndim != 1 or group_list.dtype not in (torch.int64, torch.int32)
    ):
        raise ValueError(
            "gmm needs a group_list of integers in one dimension, got "
            f"{tuple(group_list.shape)} of {group_list.dtype}"
        )
    if group_type == 2:
        if bias is not None:
            raise ValueError("gmm with group_type=2 takes no bias")
        return
    if len(group_list) != len(weight):
        raise ValueError(f"gmm has {len(weight)} matrices for {len(group_list)} groups")
    if bias is not None and bias.shape != (len(weight), weight.shape[2]):
        raise ValueError(
            f"gmm needs a bias of {(len(weight), weight.shape[2])}, got {tuple(bias.shape)}"
        )
