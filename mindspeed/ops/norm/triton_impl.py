"""All norms through one pair of Triton kernels.

z = dropout(x * row_scale * col_scale) + residual, rounded as it is stored, and
y = (z - mean) * rstd * weight + bias with rstd = 1 / sqrt(var + epsilon); RMSNorm has no mean.
Arithmetic is float32. Saved for backward: z, weight, mean and rstd of each row, and the seed, from
which the dropout mask is drawn again. Sums over rows take one partial sum per program and a second
small kernel: no atomics, so results are bitwise reproducible.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import Unpack

from mindspeed.ops.launch import launch, multiprocessors
from mindspeed.ops.norm import reference
from mindspeed.ops.norm.kernels import norm_backward, norm_forward, norm_reduce
from mindspeed.ops.norm.reference import DropoutAddNormOptions, select_outputs, sum_dtype

# A tile holds whole rows, about 4096 elements: 32 per thread forward, where a program handles one
# tile, and 16 backward, where weight and sums stay in registers too.
TILE, FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 4096, 32, 16
MAX_ROW = 65536


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Divide x (..., H) by its root mean square over the last dimension, times gamma (H,)."""
    if not _is_supported(x):
        return reference.rms_norm(x, gamma, epsilon)
    spec = NormSpec(epsilon, is_rms=True)
    return _norm(spec, x, None, gamma, None, None, None, None)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return rms_norm(x + residual) in the dtype of x, and the sum in the dtype of residual."""
    if not _is_supported(x):
        return reference.add_rms_norm(x, residual, gamma, epsilon)
    spec = NormSpec(epsilon, is_rms=True, sum_dtype=residual.dtype)
    y, total, _ = _norm(spec, x, residual, gamma, None, None, None, None)
    assert total is not None, "a sum_dtype makes _norm return the sum"
    return y, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float = 1e-5) -> Tensor:
    """Normalise x (..., H) over the last dimension, times weight (H,), plus bias (H,)."""
    if not _is_supported(x):
        return reference.layer_norm(x, weight, bias, epsilon)
    spec = NormSpec(epsilon, is_rms=False)
    return _norm(spec, x, None, weight, bias, None, None, None)[0]


def dropout_add_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    *,
    is_rms: bool,
    **options: Unpack[DropoutAddNormOptions],
) -> Tensor | tuple[Tensor | None, ...]:
    """Return the norm [, z if prenorm] [, the keep mask if return_dropout_mask].

    Backward draws the dropout again from its seed: no mask is saved, or written unless requested.
    """
    if not _is_supported(x0):
        return reference.dropout_add_norm(
            x0, residual, weight, bias, dropout_p, epsilon, is_rms=is_rms, **options
        )
    spec = NormSpec(epsilon, is_rms=is_rms, dropout_p=dropout_p)
    rowscale, layerscale = options.get("rowscale"), options.get("layerscale")
    return_mask = options.get("return_dropout_mask", False)
    z_dtype = sum_dtype(x0, residual, options.get("residual_in_fp32", False))
    optional = (residual, rowscale, layerscale)
    if dropout_p or z_dtype != x0.dtype or any(tensor is not None for tensor in optional):
        spec = spec._replace(sum_dtype=z_dtype)
    seed = None
    if dropout_p:
        spec = spec._replace(return_mask=return_mask)
        # From the generator of the device, so that Megatron's RNG states and recompute replay it.
        seed = torch.randint(0, 2**62, (1,), device=x0.device)
    out, z, mask = _norm(spec, x0, residual, weight, bias, rowscale, layerscale, seed)
    if return_mask and mask is None:
        mask = torch.ones(x0.shape, dtype=torch.bool, device=x0.device)
    return select_outputs(out, x0 if z is None else z, mask, options)


dropout_add_layer_norm = functools.partial(dropout_add_norm, is_rms=False)
dropout_add_rms_norm = functools.partial(dropout_add_norm, is_rms=True)


class NormSpec(NamedTuple):
    """The options of a norm, beside its tensors."""

    epsilon: float
    is_rms: bool
    dropout_p: float = 0.0
    return_mask: bool = False
    sum_dtype: torch.dtype | None = None
    """The dtype of z; None where z is x itself."""


def _is_supported(x: Tensor) -> bool:
    """Return whether the kernels take this dtype and row length."""
    return x.dtype != torch.float64 and x.shape[-1] <= MAX_ROW


def _norm(
    spec: NormSpec, x: Tensor, *inputs: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y, z and the keep mask; z is None where it is x.

    `inputs` are residual, weight, bias, row_scale, col_scale and the seed, a tensor on the device:
    the host does not synchronise for it, and a CUDA graph replays it.
    """
    y, *rest = _Norm.apply(spec, x, *inputs)
    return y, rest[0] if rest else None, rest[1] if spec.return_mask else None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: NormSpec, x: Tensor, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        residual, weight, bias, row_scale, col_scale, seed = inputs
        width, device = x.shape[-1], x.device
        num_rows = x.numel() // max(width, 1)
        y = torch.empty(x.shape, dtype=x.dtype, device=device)
        z = mask = None
        if spec.sum_dtype is not None:
            z = torch.empty(x.shape, dtype=spec.sum_dtype, device=device)
        if spec.return_mask:
            mask = torch.empty(x.shape, dtype=torch.bool, device=device)
        num_stats = num_rows if spec.is_rms else 2 * num_rows
        stats = torch.empty(num_stats, dtype=torch.float32, device=device)
        tile = _tile(width)
        if num_rows:
            x_rows, x_stride = _as_rows(x)
            residual_rows, residual_stride = (None, 0) if residual is None else _as_rows(residual)
            launch(
                norm_forward,
                (-(-num_rows // tile.block_m),),
                x_rows,
                residual_rows,
                weight,
                bias,
                _flatten(row_scale),
                col_scale,
                seed,
                y,
                z,
                mask,
                stats,
                num_rows,
                width,
                x_stride,
                residual_stride,
                spec.epsilon,
                spec.dropout_p,
                IS_RMS=spec.is_rms,
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
                num_warps=tile.forward_warps,
            )
        ctx.spec = spec
        ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
        scaled = x if row_scale is not None or col_scale is not None else None
        ctx.save_for_backward(
            x if z is None else z, weight, row_scale, col_scale, seed, scaled, stats
        )
        ctx.has_bias = bias is not None
        if not torch.compiler.is_compiling():  # Dynamo does not know the method
            ctx.set_materialize_grads(False)
        if mask is not None:
            ctx.mark_non_differentiable(mask)
        return tuple(out for out in (y, z, mask) if out is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, dz = grads[0], grads[1] if len(grads) > 1 else None
        z, weight, row_scale, col_scale, seed, x, stats = ctx.saved_tensors
        dy = torch.zeros_like(z) if dy is None else dy
        width, device = z.shape[-1], z.device
        num_rows = z.numel() // max(width, 1)
        x_dtype, residual_dtype = ctx.dtypes
        grad_x = torch.empty(z.shape, dtype=x_dtype, device=device)
        is_mixed = seed is not None or x is not None or residual_dtype not in (None, x_dtype)
        grad_residual = None
        if residual_dtype is not None and is_mixed:
            grad_residual = torch.empty(z.shape, dtype=residual_dtype, device=device)
        grad_row_scale = None if row_scale is None else torch.empty_like(row_scale)
        tile = _tile(width)
        num_programs = min(-(-num_rows // tile.block_m), _num_programs(device, tile.backward_warps))
        partial = _partial_sums(ctx, num_programs, width, device, col_scale)
        if num_rows:
            z_rows, z_stride = _as_rows(z)
            dy_rows, dy_stride = _as_rows(dy)
            launch(
                norm_backward,
                (num_programs,),
                dy_rows,
                None if dz is None else dz.contiguous(),
                z_rows,
                weight,
                _flatten(row_scale),
                col_scale,
                seed,
                None if x is None else x.contiguous(),
                stats,
                grad_x,
                grad_residual,
                grad_row_scale,
                partial,
                num_rows,
                width,
                z_stride,
                dy_stride,
                ctx.spec.dropout_p,
                IS_RMS=ctx.spec.is_rms,
                HAS_BIAS=ctx.has_bias,
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
                NUM_STAGES=_num_stages(tile.block_m * tile.block_n, z, dy, dz, x),
                num_warps=tile.backward_warps,
                **_max_registers(tile.backward_warps),
            )
        if residual_dtype is not None and not is_mixed:
            grad_residual = grad_x
        sums: list[Tensor | None] = [None, None, None]
        if partial is not None:
            sums = _reduce_partials(partial, weight.dtype, ctx.has_bias)
        return None, grad_x, grad_residual, sums[0], sums[1], grad_row_scale, sums[2], None


def _partial_sums(
    ctx: Any, num_programs: int, width: int, device: torch.device, col_scale: Tensor | None
) -> Tensor | None:
    if not any(ctx.needs_input_grad[index] for index in (3, 4, 6)):  # weight, bias, col_scale
        return None
    count = 1 + ctx.has_bias + (col_scale is not None)
    return torch.empty((count, num_programs, width), dtype=torch.float32, device=device)


def _reduce_partials(partial: Tensor, dtype: torch.dtype, has_bias: bool) -> list[Tensor | None]:
    """Return the gradients of weight, bias and col_scale, None for those that do not exist."""
    out = add_partial_sums(partial, dtype)
    if len(out) == 1:
        return [out.view(-1), None, None]
    sums: list[Tensor | None] = list(out.unbind())
    if not has_bias:
        sums.insert(1, None)
    return sums if len(sums) == 3 else [*sums, None]


def add_partial_sums(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums (count, N) of (count, programs, N), added in the order of programs."""
    count, num_programs, width = partial.shape
    out = torch.empty((count, width), dtype=dtype, device=partial.device)
    # All partial sums of 16 columns at once: one pass over memory, one program a multiprocessor.
    block_m = min(512, triton.next_power_of_2(max(num_programs, 1)))
    launch(
        norm_reduce,
        (-(-width // 16), count),
        partial,
        out,
        num_programs,
        width,
        BLOCK_M=block_m,
        BLOCK_N=16,
        num_warps=8 if block_m == 512 else 4,
    )
    return out


def _as_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return x as a matrix and its row stride; copy only where the strides do not allow a view."""
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def _flatten(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.reshape(-1)


class _Tile(NamedTuple):
    """The tile of a program: whole rows, padded to a power of two."""

    block_n: int
    block_m: int
    forward_warps: int
    backward_warps: int


@functools.cache
def _tile(width: int) -> _Tile:
    block_n = max(16, triton.next_power_of_2(width))
    block_m = max(1, TILE // block_n)
    warps = (
        min(32, max(4, block_m * block_n // (32 * elements)))
        for elements in (FORWARD_ELEMENTS, BACKWARD_ELEMENTS)
    )
    return _Tile(block_n, block_m, *warps)


@functools.cache
def _num_programs(device: torch.device, warps: int) -> int:
    """Return the grid of backward: sixteen warps a multiprocessor, as its registers allow.

    A power of two, so that common numbers of rows divide evenly.
    """
    if device.type != "cuda":
        return 4  # Triton's interpreter: enough to have partial sums to add
    most = multiprocessors() * max(1, 16 // warps)
    return 1 << (most.bit_length() - 1)


def _max_registers(warps: int) -> dict[str, int]:
    """Limit the registers of a program, so that sixteen warps fit on a multiprocessor."""
    is_unlimited = warps > 16 or torch.compiler.is_compiling()  # which does not know the option
    return {} if is_unlimited else {"maxnreg": 128}


def _num_stages(elements: int, *loaded: Tensor | None) -> int:
    """Prefetch the next two tiles while one is reduced, where shared memory holds them."""
    tile = elements * sum(0 if tensor is None else tensor.element_size() for tensor in loaded)
    return 3 if 2 * tile <= 96 * 1024 else 1
