"""Triton kernels of all norms; the formulas are in triton_impl.

M rows of N elements. An optional tensor that was not given is None, and its part of the kernel is
not compiled.
"""

import triton
import triton.language as tl


@triton.jit
def _draw_keep_mask(seed_ptr, offs_m, dropout_p, BLOCK_N: tl.constexpr):
    """Draw the dropout mask of a tile, four elements at a time, from seed and offset alone."""
    offs = offs_m[:, None] * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)[None, :]
    a, b, c, d = tl.rand4x(tl.load(seed_ptr), offs)
    drawn = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(drawn, (offs_m.shape[0], BLOCK_N)) >= dropout_p


@triton.jit
def norm_forward(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    row_scale_ptr,
    col_scale_ptr,
    seed_ptr,
    y_ptr,
    z_ptr,
    keep_ptr,
    stats_ptr,
    M,
    N,
    stride_xm,
    stride_rm,
    eps,
    dropout_p,
    IS_RMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Normalise BLOCK_M whole rows: one program, one tile."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    mask = mask_m[:, None] & mask_n[None, :]
    offs = offs_m[:, None] * N + offs_n[None, :]
    z = tl.load(x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :], mask=mask, other=0.0)
    z = z.to(tl.float32)
    if row_scale_ptr is not None:
        z *= tl.load(row_scale_ptr + offs_m, mask=mask_m, other=0.0).to(tl.float32)[:, None]
    if col_scale_ptr is not None:
        z *= tl.load(col_scale_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if seed_ptr is not None:
        keep = _draw_keep_mask(seed_ptr, offs_m, dropout_p, BLOCK_N)
        z = tl.where(keep, z / (1.0 - dropout_p), 0.0)
        if keep_ptr is not None:
            tl.store(keep_ptr + offs, keep, mask=mask)
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + offs_m[:, None] * stride_rm + offs_n[None, :]
        z += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    if z_ptr is not None:
        rounded = z.to(z_ptr.dtype.element_ty)
        tl.store(z_ptr + offs, rounded, mask=mask)
        z = rounded.to(tl.float32)
    if not IS_RMS:
        mean = tl.sum(z, axis=1) / N
        tl.store(stats_ptr + M + offs_m, mean, mask=mask_m)
        z = tl.where(mask, z - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(z * z, axis=1) / N + eps)
    tl.store(stats_ptr + offs_m, rstd, mask=mask_m)
    z *= rstd[:, None]
    z *= tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        z += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + offs, z.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_backward(
    dy_ptr,
    dz_ptr,
    z_ptr,
    weight_ptr,
    row_scale_ptr,
    col_scale_ptr,
    seed_ptr,
    x_ptr,
    stats_ptr,
    dx_ptr,
    dresidual_ptr,
    drow_scale_ptr,
    partial_ptr,
    M,
    N,
    stride_zm,
    stride_dym,
    dropout_p,
    IS_RMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Write the gradients of every `num_programs`-th tile and this program's sums over its rows."""
    pid, num_programs = tl.program_id(0), tl.num_programs(0)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    weight = tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if col_scale_ptr is not None:
        col_scale = tl.load(col_scale_ptr + offs_n, mask=mask_n, other=0.0)
        col_scale = col_scale.to(tl.float32)[None, :]
        acc_col_scale = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_weight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if HAS_BIAS:
        acc_bias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start_m in tl.range(pid * BLOCK_M, M, num_programs * BLOCK_M, num_stages=NUM_STAGES):
        offs_m = (start_m + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask_m = offs_m < M
        mask = mask_m[:, None] & mask_n[None, :]
        offs = offs_m[:, None] * N + offs_n[None, :]
        z_hat = tl.load(z_ptr + offs_m[:, None] * stride_zm + offs_n[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + offs_m[:, None] * stride_dym + offs_n[None, :], mask=mask, other=0.0)
        z_hat, dy = z_hat.to(tl.float32), dy.to(tl.float32)
        rstd = tl.load(stats_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        if not IS_RMS:
            z_hat -= tl.load(stats_ptr + M + offs_m, mask=mask_m, other=0.0)[:, None]
        z_hat *= rstd
        if partial_ptr is not None:
            acc_weight += dy * z_hat
            if HAS_BIAS:
                acc_bias += dy
        dy *= weight
        dz = dy - z_hat * (tl.sum(dy * z_hat, axis=1) / N)[:, None]
        if not IS_RMS:
            dz -= (tl.sum(dy, axis=1) / N)[:, None]
        dz *= rstd
        if dz_ptr is not None:
            dz += tl.load(dz_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + offs, dz.to(dresidual_ptr.dtype.element_ty), mask=mask)
        if seed_ptr is not None:
            keep = _draw_keep_mask(seed_ptr, offs_m, dropout_p, BLOCK_N)
            dz = tl.where(keep, dz / (1.0 - dropout_p), 0.0)
        if x_ptr is not None:
            dscale = dz * tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        if row_scale_ptr is not None:
            row_scale = tl.load(row_scale_ptr + offs_m, mask=mask_m, other=0.0)
            row_scale = row_scale.to(tl.float32)[:, None]
            drow = tl.sum(dscale if col_scale_ptr is None else dscale * col_scale, axis=1)
            tl.store(drow_scale_ptr + offs_m, drow.to(drow_scale_ptr.dtype.element_ty), mask=mask_m)
            dz *= row_scale
            dscale *= row_scale
        if col_scale_ptr is not None:
            acc_col_scale += tl.where(mask, dscale, 0.0)
            dz *= col_scale
        tl.store(dx_ptr + offs, dz.to(dx_ptr.dtype.element_ty), mask=mask)
    if partial_ptr is not None:
        partial_ptrs = partial_ptr + pid * N + offs_n
        tl.store(partial_ptrs, tl.sum(acc_weight, axis=0), mask=mask_n)
        if HAS_BIAS:
            partial_ptrs += num_programs * N
            tl.store(partial_ptrs, tl.sum(acc_bias, axis=0), mask=mask_n)
        if col_scale_ptr is not None:
            partial_ptrs += num_programs * N
            tl.store(partial_ptrs, tl.sum(acc_col_scale, axis=0), mask=mask_n)


@triton.jit
def norm_reduce(
    partial_ptr, out_ptr, num_partials, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Add up the partial sums of all programs, in program order."""
    which = tl.program_id(1).to(tl.int64)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start_m in range(0, num_partials, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        mask = (offs_m < num_partials)[:, None] & mask_n[None, :]
        offs = (which * num_partials + offs_m)[:, None] * N + offs_n[None, :]
        acc += tl.load(partial_ptr + offs, mask=mask, other=0.0)
    sums = tl.sum(acc, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + which * N + offs_n, sums, mask=mask_n)
