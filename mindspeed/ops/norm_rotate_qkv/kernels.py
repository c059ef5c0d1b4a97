"""Triton kernels of normed and rotated heads; triton_impl describes what a program does.

Queries, keys and values come as a pointer and three strides each, of sequence, batch and head; the
packed tensor is contiguous. A head is loaded in parts: the first and the second channels of the
pairs that are rotated, and the rest of its channels, if there are any.
"""

import triton
import triton.language as tl


@triton.jit
def _head_ptrs(
    q_ptr,
    stride_qs,
    stride_qb,
    stride_qh,
    k_ptr,
    stride_ks,
    stride_kb,
    stride_kh,
    v_ptr,
    stride_vs,
    stride_vb,
    stride_vh,
    s,
    b,
    offs_h,
    Q_HEADS: tl.constexpr,
):
    """Return a pointer to each head of a token, wherever it is, (BLOCK_H, 1)."""
    group, part = offs_h // (Q_HEADS + 2), offs_h % (Q_HEADS + 2)
    q_ptrs = q_ptr + s * stride_qs + b * stride_qb + (group * Q_HEADS + part) * stride_qh
    k_ptrs = k_ptr + s * stride_ks + b * stride_kb + group * stride_kh
    v_ptrs = v_ptr + s * stride_vs + b * stride_vb + group * stride_vh
    return q_ptrs[:, None], k_ptrs[:, None], v_ptrs[:, None]


@triton.jit
def _select(q_ptrs, k_ptrs, v_ptrs, offs, part, Q_HEADS: tl.constexpr):
    """Return the pointers to channels of each head, (BLOCK_H, BLOCK)."""
    # Selected after the addition: the compiler then still knows which pointers are contiguous.
    kv_ptrs = tl.where(part == Q_HEADS, k_ptrs + offs[None, :], v_ptrs + offs[None, :])
    return tl.where(part < Q_HEADS, q_ptrs + offs[None, :], kv_ptrs)


@triton.jit
def _load(ptrs, mask):
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(ptrs, x, mask):
    tl.store(ptrs, x.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _load_row(ptr, offs, mask):
    return _load(ptr + offs, mask)[None, :]


@triton.jit
def _load_gamma(q_weight_ptr, k_weight_ptr, offs, mask, is_q, ZERO_CENTERED: tl.constexpr):
    """Return the factors of each head; those of a value are not used."""
    gamma = tl.where(is_q, _load_row(q_weight_ptr, offs, mask), _load_row(k_weight_ptr, offs, mask))
    return gamma + 1.0 if ZERO_CENTERED else gamma


@triton.jit
def _load_table(cos_ptr, sin_ptr, offs_t, lower, upper, mask):
    """Return the cosines and sines of the first and the second channels of a token's pairs."""
    cos1, cos2 = _load_row(cos_ptr + offs_t, lower, mask), _load_row(cos_ptr + offs_t, upper, mask)
    sin1, sin2 = _load_row(sin_ptr + offs_t, lower, mask), _load_row(sin_ptr + offs_t, upper, mask)
    return cos1, cos2, sin1, sin2


@triton.jit
def _inverse_rms(sum_squares, eps, HEAD_DIM: tl.constexpr):
    rstd = 1.0 / tl.sqrt(sum_squares / HEAD_DIM + eps)
    return rstd.to(tl.float32)[:, None]  # torch.compile passes eps as float64


@triton.jit
def norm_rotate(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_ptr,
    stride_qs,
    stride_qb,
    stride_qh,
    k_ptr,
    stride_ks,
    stride_kb,
    stride_kh,
    v_ptr,
    stride_vs,
    stride_vb,
    stride_vh,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    stride_ts,
    stride_tb,
    tokens,
    batch,
    num_heads,
    eps,
    Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Norm and rotate the same BLOCK_H heads of every `num_programs`-th token; copy its values."""
    pid, num_programs = tl.program_id(0), tl.num_programs(0)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    part = (offs_h % (Q_HEADS + 2))[:, None]
    is_q, is_v = part < Q_HEADS, part > Q_HEADS
    mask_h = (offs_h < num_heads)[:, None]
    lower = tl.arange(0, BLOCK_PAIRS)
    upper = lower + ROTARY_DIM // 2
    mask_pair = lower < ROTARY_DIM // 2
    mask = mask_h & mask_pair[None, :]
    gamma1 = _load_gamma(q_weight_ptr, k_weight_ptr, lower, mask_pair, is_q, ZERO_CENTERED)
    gamma2 = _load_gamma(q_weight_ptr, k_weight_ptr, upper, mask_pair, is_q, ZERO_CENTERED)
    if BLOCK_REST > 0:
        rest = ROTARY_DIM + tl.arange(0, BLOCK_REST)
        mask_rest = rest < HEAD_DIM
        mask3 = mask_h & mask_rest[None, :]
        gamma3 = _load_gamma(q_weight_ptr, k_weight_ptr, rest, mask_rest, is_q, ZERO_CENTERED)
    for index in tl.range(pid, tokens, num_programs, num_stages=NUM_STAGES):
        token = tl.cast(index, tl.int64)
        s, b = token // batch, token % batch
        x_ptrs = qkv_ptr + (token * num_heads + offs_h)[:, None] * HEAD_DIM
        # fmt: off
        q_ptrs, k_ptrs, v_ptrs = _head_ptrs(
            q_ptr, stride_qs, stride_qb, stride_qh, k_ptr, stride_ks, stride_kb, stride_kh,
            v_ptr, stride_vs, stride_vb, stride_vh, s, b, offs_h, Q_HEADS
        )
        # fmt: on
        x1 = _load(x_ptrs + lower[None, :], mask)
        x2 = _load(x_ptrs + upper[None, :], mask)
        row = s if positions_ptr is None else tl.load(positions_ptr + token).to(tl.int64)
        offs_t = row * stride_ts + b * stride_tb
        cos1, cos2, sin1, sin2 = _load_table(cos_ptr, sin_ptr, offs_t, lower, upper, mask_pair)
        sum_squares = tl.sum(x1 * x1 + x2 * x2, axis=1)
        if BLOCK_REST > 0:
            x3 = _load(x_ptrs + rest[None, :], mask3)
            sum_squares += tl.sum(x3 * x3, axis=1)
        rstd = _inverse_rms(sum_squares, eps, HEAD_DIM)
        y1, y2 = x1 * rstd * gamma1, x2 * rstd * gamma2
        out1 = tl.where(is_v, x1, y1 * cos1 - y2 * sin1)
        out2 = tl.where(is_v, x2, y2 * cos2 + y1 * sin2)
        _store(_select(q_ptrs, k_ptrs, v_ptrs, lower, part, Q_HEADS), out1, mask)
        _store(_select(q_ptrs, k_ptrs, v_ptrs, upper, part, Q_HEADS), out2, mask)
        if BLOCK_REST > 0:
            out3 = tl.where(is_v, x3, x3 * rstd * gamma3)
            _store(_select(q_ptrs, k_ptrs, v_ptrs, rest, part, Q_HEADS), out3, mask3)


@triton.jit
def norm_rotate_backward(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    dq_ptr,
    stride_qs,
    stride_qb,
    stride_qh,
    dk_ptr,
    stride_ks,
    stride_kb,
    stride_kh,
    dv_ptr,
    stride_vs,
    stride_vb,
    stride_vh,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    stride_ts,
    stride_tb,
    dqkv_ptr,
    partial_ptr,
    tokens,
    batch,
    num_heads,
    eps,
    Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Write the gradient of the same BLOCK_H heads of every `num_programs`-th token.

    Sums of the weights' gradients over these heads go to (2, programs, HEAD_DIM) partial sums.
    """
    pid, num_programs = tl.program_id(0), tl.num_programs(0)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    part = (offs_h % (Q_HEADS + 2))[:, None]
    is_q, is_v = part < Q_HEADS, part > Q_HEADS
    mask_h = (offs_h < num_heads)[:, None]
    lower = tl.arange(0, BLOCK_PAIRS)
    upper = lower + ROTARY_DIM // 2
    mask_pair = lower < ROTARY_DIM // 2
    mask = mask_h & mask_pair[None, :]
    gamma1 = _load_gamma(q_weight_ptr, k_weight_ptr, lower, mask_pair, is_q, ZERO_CENTERED)
    gamma2 = _load_gamma(q_weight_ptr, k_weight_ptr, upper, mask_pair, is_q, ZERO_CENTERED)
    acc1 = tl.zeros((BLOCK_H, BLOCK_PAIRS), tl.float32)
    acc2 = tl.zeros((BLOCK_H, BLOCK_PAIRS), tl.float32)
    if BLOCK_REST > 0:
        rest = ROTARY_DIM + tl.arange(0, BLOCK_REST)
        mask_rest = rest < HEAD_DIM
        mask3 = mask_h & mask_rest[None, :]
        gamma3 = _load_gamma(q_weight_ptr, k_weight_ptr, rest, mask_rest, is_q, ZERO_CENTERED)
        acc3 = tl.zeros((BLOCK_H, BLOCK_REST), tl.float32)
    for index in tl.range(pid, tokens, num_programs, num_stages=NUM_STAGES):
        token = tl.cast(index, tl.int64)
        s, b = token // batch, token % batch
        offs_x = (token * num_heads + offs_h)[:, None] * HEAD_DIM
        # fmt: off
        dq_ptrs, dk_ptrs, dv_ptrs = _head_ptrs(
            dq_ptr, stride_qs, stride_qb, stride_qh, dk_ptr, stride_ks, stride_kb, stride_kh,
            dv_ptr, stride_vs, stride_vb, stride_vh, s, b, offs_h, Q_HEADS
        )
        # fmt: on
        x1 = _load(qkv_ptr + offs_x + lower[None, :], mask)
        x2 = _load(qkv_ptr + offs_x + upper[None, :], mask)
        dy1 = _load(_select(dq_ptrs, dk_ptrs, dv_ptrs, lower, part, Q_HEADS), mask)
        dy2 = _load(_select(dq_ptrs, dk_ptrs, dv_ptrs, upper, part, Q_HEADS), mask)
        row = s if positions_ptr is None else tl.load(positions_ptr + token).to(tl.int64)
        offs_t = row * stride_ts + b * stride_tb
        cos1, cos2, sin1, sin2 = _load_table(cos_ptr, sin_ptr, offs_t, lower, upper, mask_pair)
        grad1, grad2 = dy1 * cos1 + dy2 * sin2, dy2 * cos2 - dy1 * sin1
        # The inverse root mean square is computed again: x is loaded in any case.
        sum_squares = tl.sum(x1 * x1 + x2 * x2, axis=1)
        along = tl.sum(x1 * grad1 * gamma1 + x2 * grad2 * gamma2, axis=1)
        if BLOCK_REST > 0:
            x3 = _load(qkv_ptr + offs_x + rest[None, :], mask3)
            grad3 = _load(_select(dq_ptrs, dk_ptrs, dv_ptrs, rest, part, Q_HEADS), mask3)
            sum_squares += tl.sum(x3 * x3, axis=1)
            along += tl.sum(x3 * grad3 * gamma3, axis=1)
        rstd = _inverse_rms(sum_squares, eps, HEAD_DIM)
        along = along[:, None] * rstd * rstd / HEAD_DIM
        acc1 += grad1 * x1 * rstd
        acc2 += grad2 * x2 * rstd
        dx1 = tl.where(is_v, dy1, rstd * (grad1 * gamma1 - x1 * along))
        dx2 = tl.where(is_v, dy2, rstd * (grad2 * gamma2 - x2 * along))
        dx_ptrs = dqkv_ptr + offs_x
        _store(dx_ptrs + lower[None, :], dx1, mask)
        _store(dx_ptrs + upper[None, :], dx2, mask)
        if BLOCK_REST > 0:
            acc3 += grad3 * x3 * rstd
            dx3 = tl.where(is_v, grad3, rstd * (grad3 * gamma3 - x3 * along))
            _store(dx_ptrs + rest[None, :], dx3, mask3)
    if partial_ptr is not None:
        program = pid * tl.num_programs(1) + tl.program_id(1)
        q_sums_ptr = partial_ptr + program * HEAD_DIM
        k_sums_ptr = q_sums_ptr + num_programs * tl.num_programs(1) * HEAD_DIM
        is_q, is_k = mask_h & is_q, mask_h & (part == Q_HEADS)
        _store_sums(q_sums_ptr, lower, mask_pair, acc1, is_q)
        _store_sums(q_sums_ptr, upper, mask_pair, acc2, is_q)
        _store_sums(k_sums_ptr, lower, mask_pair, acc1, is_k)
        _store_sums(k_sums_ptr, upper, mask_pair, acc2, is_k)
        if BLOCK_REST > 0:
            _store_sums(q_sums_ptr, rest, mask_rest, acc3, is_q)
            _store_sums(k_sums_ptr, rest, mask_rest, acc3, is_k)


@triton.jit
def _store_sums(ptr, offs, mask, acc, is_counted):
    tl.store(ptr + offs, tl.sum(tl.where(is_counted, acc, 0.0), axis=0), mask=mask)
