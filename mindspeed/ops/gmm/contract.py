"""What a grouped matrix product is, whoever multiplies.

M rows in E groups, K and N columns. `ends` (E,) int32 holds the row behind each group's last.
group_type 0 groups rows: x (M, K), weight (E, K, N) -> (M, N). group_type 2 groups the dimension
that is summed over: x (K, M), weight (M, N) -> (E * K, N), one (K, N) product a group.
group_type -1 has no groups: equally long lists of matrices, one product each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed.ops.groupmatmul_add_fp32 import groupmatmul_add_fp32
from mindspeed.ops.matmul_add_fp32.main_grad import placeholder

GroupList = Tensor | Sequence[int] | None
Matrices = Tensor | Sequence[Tensor]
_ONES = 8  # the shortest row that is aligned for every implementation


class Products(NamedTuple):
    """The two products that make up every grouped one and its gradients."""

    rows: Callable[[Tensor, Tensor, Tensor], Tensor]
    """x (M, K), weight (E, K, N), ends -> (M, N)"""
    outer: Callable[[Tensor, Tensor, Tensor], Tensor]
    """x (M, K), y (M, N), ends -> (E, K, N), zeros for empty groups"""


class Grouping(NamedTuple):
    """How the caller described the groups, and where the gradient of the weight goes."""

    group_list: GroupList
    is_cumulative: bool
    group_type: int
    original_weight: Tensor | None

    def ends(self, device: torch.device) -> Tensor:
        """Return the ends of the groups on the device, which is not waited for."""
        groups = self.group_list
        if not isinstance(groups, Tensor):
            groups = torch.tensor(groups, dtype=torch.int32)
        groups = groups.to(device, non_blocking=True)
        return (groups if self.is_cumulative else groups.cumsum(0)).to(torch.int32)


def operators(products: Products) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Make gmm, whose group_list holds ends, and gmm_v2, whose group_list holds sizes."""

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
                group_list: E numbers, a list or a tensor on any device, which is not waited for.
                group_type: -1 no groups, 0 groups of rows, 2 groups of the summed dimension.
                gemm_fusion: add the gradient of weight to `original_weight.main_grad` in float32.
                original_weight: the parameter that weight is a view of.
            """
            owner = original_weight if gemm_fusion else None
            grouping = Grouping(group_list, is_cumulative, group_type, owner)
            return _multiply(products, x, weight, bias, grouping)

        return multiply

    return make(True), make(False)


def _multiply(
    products: Products, x: Matrices, weight: Matrices, bias: Matrices | None, grouping: Grouping
) -> Any:
    if grouping.group_type == -1:
        return _one_by_one(x, weight, bias)
    ends = grouping.ends(x.device)
    if grouping.group_type == 2:
        return _SumGroups.apply(x, weight, ends, products).flatten(0, 1)
    return _RowGroups.apply(x, weight, bias, ends, products, grouping.original_weight)


def _one_by_one(x: Matrices, weight: Matrices, bias: Matrices | None) -> Any:
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
        products: Products,
        original_weight: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.products, ctx.original_weight = products, original_weight
        out = products.rows(x, weight, ends)
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
            grad_x = ctx.products.rows(grad, weight.transpose(1, 2), ends)
        if ctx.needs_input_grad[1]:
            if ctx.original_weight is None:
                grad_weight = ctx.products.outer(x, grad, ends)
            else:
                groupmatmul_add_fp32(x, grad, ends, ctx.original_weight.main_grad)
                grad_weight = placeholder(ctx.original_weight, like=weight)
        if ctx.needs_input_grad[2]:
            # The sum of a group's rows as a product with ones: no atomics, so always the same.
            ones = grad.new_ones(len(grad), _ONES)
            grad_bias = ctx.products.outer(ones, grad, ends)[:, 0]
        return grad_x, grad_weight, grad_bias, None, None, None


class _SumGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, ends: Tensor, products: Products) -> Tensor:
        ctx.save_for_backward(x, y, ends)
        ctx.products = products
        return products.outer(x.t(), y, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, ends = ctx.saved_tensors
        grad_x = grad_y = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.products.rows(y, grad.transpose(1, 2), ends).t()
        if ctx.needs_input_grad[1]:
            grad_y = ctx.products.rows(x.t(), grad, ends)
        return grad_x, grad_y, None, None


def check(
    x: Matrices,
    weight: Matrices,
    *,
    bias: Matrices | None = None,
    group_list: GroupList = None,
    group_type: int = 0,
    gemm_fusion: bool = False,
    original_weight: Tensor | None = None,
) -> None:
    """Refuse what no implementation serves."""
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
    given = [getattr(value, "ndim", "list") for value in (x, weight)]
    if tuple(given) != dims:
        raise ValueError(
            f"gmm with group_type={group_type} multiplies tensors of {dims[0]} and {dims[1]} "
            f"dimensions, got {given[0]} and {given[1]}"
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
