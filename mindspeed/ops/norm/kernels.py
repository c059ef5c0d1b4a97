"""The Triton kernels of all norms; the formulas are told in triton_impl.

A tensor that is not there is None, and its part of the kernel is not compiled.
"""

import triton
import triton.language as tl


@triton.jit
def _kept(seed, row, drop, BLOCK: tl.constexpr):
    """Draw which numbers of a tile survive, four at a time, from their place alone."""
    place = row[:, None] * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
    a, b, c, d = tl.rand4x(tl.load(seed), place)
    drawn = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(drawn, (row.shape[0], BLOCK)) >= drop


@triton.jit
def norm_forward(
    x,
    residual,
    weight,
    bias,
    row_scale,
    column_scale,
    seed,
    y,
    z,
    mask,
    statistics,
    num_rows,
    width,
    x_stride,
    residual_stride,
    epsilon,
    drop,
    IS_RMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise ROWS whole rows: one program, one tile."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_row, is_column = row < num_rows, column < width
    inside = is_row[:, None] & is_column[None, :]
    place = row[:, None] * width + column[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    value = value.to(tl.float32)
    if row_scale is not None:
        value *= tl.load(row_scale + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if column_scale is not None:
        value *= tl.load(column_scale + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if seed is not None:
        kept = _kept(seed, row, drop, BLOCK)
        value = tl.where(kept, value / (1.0 - drop), 0.0)
        if mask is not None:
            tl.store(mask + place, kept, mask=inside)
    if residual is not None:
        other = residual + row[:, None] * residual_stride + column[None, :]
        value += tl.load(other, mask=inside, other=0.0).to(tl.float32)
    if z is not None:
        rounded = value.to(z.dtype.element_ty)
        tl.store(z + place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if not IS_RMS:
        mean = tl.sum(value, axis=1) / width
        tl.store(statistics + num_rows + row, mean, mask=is_row)
        value = tl.where(inside, value - mean[:, None], 0.0)
    r = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / width + epsilon)
    tl.store(statistics + row, r, mask=is_row)
    value *= r[:, None]
    value *= tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        value += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(y + place, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
    grad,
    grad_z,
    z,
    weight,
    row_scale,
    column_scale,
    seed,
    x,
    statistics,
    grad_x,
    grad_residual,
    grad_rows,
    partial,
    num_rows,
    width,
    z_stride,
    grad_stride,
    drop,
    IS_RMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradients of every `programs`-th tile, and this program's sums over its rows."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    is_column = column < width
    gamma = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if column_scale is not None:
        scale = tl.load(column_scale + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        sum_scale = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    if HAS_BIAS:
        sum_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(program * ROWS, num_rows, programs * ROWS, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        is_row = row < num_rows
        inside = is_row[:, None] & is_column[None, :]
        place = row[:, None] * width + column[None, :]
        normed = tl.load(z + row[:, None] * z_stride + column[None, :], mask=inside, other=0.0)
        dy = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0)
        normed, dy = normed.to(tl.float32), dy.to(tl.float32)
        r = tl.load(statistics + row, mask=is_row, other=0.0)[:, None]
        if not IS_RMS:
            normed -= tl.load(statistics + num_rows + row, mask=is_row, other=0.0)[:, None]
        normed *= r
        if partial is not None:
            sum_weight += dy * normed
            if HAS_BIAS:
                sum_bias += dy
        dy *= gamma
        dz = dy - normed * (tl.sum(dy * normed, axis=1) / width)[:, None]
        if not IS_RMS:
            dz -= (tl.sum(dy, axis=1) / width)[:, None]
        dz *= r
        if grad_z is not None:
            dz += tl.load(grad_z + place, mask=inside, other=0.0).to(tl.float32)
        if grad_residual is not None:
            tl.store(grad_residual + place, dz.to(grad_residual.dtype.element_ty), mask=inside)
        if seed is not None:
            dz = tl.where(_kept(seed, row, drop, BLOCK), dz / (1.0 - drop), 0.0)
        if x is not None:
            product = dz * tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        if row_scale is not None:
            factor = tl.load(row_scale + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
            sum_row = tl.sum(product if column_scale is None else product * scale, axis=1)
            tl.store(grad_rows + row, sum_row.to(grad_rows.dtype.element_ty), mask=is_row)
            dz *= factor
            product *= factor
        if column_scale is not None:
            sum_scale += tl.where(inside, product, 0.0)
            dz *= scale
        tl.store(grad_x + place, dz.to(grad_x.dtype.element_ty), mask=inside)
    if partial is not None:
        slot = partial + program * width + column
        tl.store(slot, tl.sum(sum_weight, axis=0), mask=is_column)
        if HAS_BIAS:
            slot += programs * width
            tl.store(slot, tl.sum(sum_bias, axis=0), mask=is_column)
        if column_scale is not None:
            slot += programs * width
            tl.store(slot, tl.sum(sum_scale, axis=0), mask=is_column)


@triton.jit
def norm_reduce(partial, out, programs, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the programs' sums up, in the order of the programs."""
    which = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < programs)[:, None] & is_column[None, :]
        place = (which * programs + row)[:, None] * width + column[None, :]
        total += tl.load(partial + place, mask=inside, other=0.0)
    sums = tl.sum(total, axis=0).to(out.dtype.element_ty)
    tl.store(out + which * width + column, sums, mask=is_column)
