"""Triton kernel of the rotary embedding; triton_impl describes what a program does.

Queries, keys and values come and go as a pointer and three strides each, of sequence, batch and
head. One that was not given is None. A packed tensor is given as the queries alone.
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
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
    """Return pointers to each head of a token in the queries, keys and values."""
    group, part = offs_h // (Q_HEADS + K_HEADS + V_HEADS), offs_h % (Q_HEADS + K_HEADS + V_HEADS)
    if IS_PACKED:
        q_ptrs = q_ptr + s * stride_qs + b * stride_qb + offs_h * stride_qh
        k_ptrs, v_ptrs = q_ptrs, q_ptrs
    else:
        q_ptrs = q_ptr + s * stride_qs + b * stride_qb + (group * Q_HEADS + part) * stride_qh
        k_ptrs, v_ptrs = q_ptrs, q_ptrs
        if K_HEADS > 0:
            k_ptrs = k_ptr + s * stride_ks + b * stride_kb
            k_ptrs += (group * K_HEADS + part - Q_HEADS) * stride_kh
        if V_HEADS > 0:
            v_ptrs = v_ptr + s * stride_vs + b * stride_vb
            v_ptrs += (group * V_HEADS + part - Q_HEADS - K_HEADS) * stride_vh
    return q_ptrs[:, None], k_ptrs[:, None], v_ptrs[:, None]


@triton.jit
def _load(
    q_ptrs,
    k_ptrs,
    v_ptrs,
    offs_d,
    is_q,
    is_k,
    is_v,
    mask,
    K_HEADS,
    V_HEADS,
    IS_PACKED: tl.constexpr,
):
    if IS_PACKED:
        return tl.load(q_ptrs + offs_d, mask=mask, other=0.0)
    x = tl.load(q_ptrs + offs_d, mask=mask & is_q, other=0.0)
    if K_HEADS > 0:
        x += tl.load(k_ptrs + offs_d, mask=mask & is_k, other=0.0)
    if V_HEADS > 0:
        x += tl.load(v_ptrs + offs_d, mask=mask & is_v, other=0.0)
    return x


@triton.jit
def _store(
    q_ptrs,
    k_ptrs,
    v_ptrs,
    offs_d,
    x,
    is_q,
    is_k,
    is_v,
    mask,
    K_HEADS,
    V_HEADS,
    IS_PACKED: tl.constexpr,
):
    if IS_PACKED:
        tl.store(q_ptrs + offs_d, x, mask=mask)
    else:
        tl.store(q_ptrs + offs_d, x, mask=mask & is_q)
        if K_HEADS > 0:
            tl.store(k_ptrs + offs_d, x, mask=mask & is_k)
        if V_HEADS > 0:
            tl.store(v_ptrs + offs_d, x, mask=mask & is_v)


@triton.jit
def rotate(
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
    q_out_ptr,
    stride_qos,
    stride_qob,
    stride_qoh,
    k_out_ptr,
    stride_kos,
    stride_kob,
    stride_koh,
    v_out_ptr,
    stride_vos,
    stride_vob,
    stride_voh,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    stride_ts,
    stride_tb,
    batch,
    num_heads,
    IS_FORWARD: tl.constexpr,
    IN_PACKED: tl.constexpr,
    OUT_PACKED: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Rotate BLOCK_H heads of a token, queries and keys, and copy its values."""
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    part = offs_h % (Q_HEADS + K_HEADS + V_HEADS)
    # fmt: off
    q_in, k_in, v_in = _head_ptrs(
        q_ptr, stride_qs, stride_qb, stride_qh, k_ptr, stride_ks, stride_kb, stride_kh,
        v_ptr, stride_vs, stride_vb, stride_vh,
        s, b, offs_h, Q_HEADS, K_HEADS, V_HEADS, IN_PACKED
    )
    q_out, k_out, v_out = _head_ptrs(
        q_out_ptr, stride_qos, stride_qob, stride_qoh,
        k_out_ptr, stride_kos, stride_kob, stride_koh,
        v_out_ptr, stride_vos, stride_vob, stride_voh,
        s, b, offs_h, Q_HEADS, K_HEADS, V_HEADS, OUT_PACKED
    )
    # fmt: on
    is_q, is_v = (part < Q_HEADS)[:, None], (part >= Q_HEADS + K_HEADS)[:, None]
    is_k = (part >= Q_HEADS)[:, None] & (part < Q_HEADS + K_HEADS)[:, None]
    mask_h = (offs_h < num_heads)[:, None]
    offs_pair = tl.arange(0, BLOCK_PAIRS)
    mask = mask_h & (offs_pair < ROTARY_DIM // 2)[None, :]
    row = s if positions_ptr is None else tl.load(positions_ptr + token).to(tl.int64)
    offs_t = row * stride_ts + b * stride_tb
    # fmt: off
    if INTERLEAVED:
        # Load neighbours together and split them in registers: whole cache lines, not every other
        # element.
        offs_d = tl.arange(0, 2 * BLOCK_PAIRS)
        mask_d = offs_d < ROTARY_DIM
        mask = mask_h & mask_d[None, :]
        x = _load(
            q_in, k_in, v_in, offs_d[None, :], is_q, is_k, is_v, mask, K_HEADS, V_HEADS, IN_PACKED
        )
        x1, x2 = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_PAIRS, 2)))
        cos = tl.load(cos_ptr + offs_t + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + offs_t + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        cos1, cos2 = tl.split(tl.reshape(cos, (BLOCK_PAIRS, 2)))
        sin1, sin2 = tl.split(tl.reshape(sin, (BLOCK_PAIRS, 2)))
    else:
        lower, upper = offs_pair[None, :], (offs_pair + ROTARY_DIM // 2)[None, :]
        x1 = _load(q_in, k_in, v_in, lower, is_q, is_k, is_v, mask, K_HEADS, V_HEADS, IN_PACKED)
        x2 = _load(q_in, k_in, v_in, upper, is_q, is_k, is_v, mask, K_HEADS, V_HEADS, IN_PACKED)
        mask_pair = offs_pair < ROTARY_DIM // 2
        cos1 = tl.load(cos_ptr + offs_t + offs_pair, mask=mask_pair, other=0.0).to(tl.float32)
        cos2 = tl.load(cos_ptr + offs_t + offs_pair + ROTARY_DIM // 2, mask=mask_pair, other=0.0)
        cos2 = cos2.to(tl.float32)
        sin1 = tl.load(sin_ptr + offs_t + offs_pair, mask=mask_pair, other=0.0).to(tl.float32)
        sin2 = tl.load(sin_ptr + offs_t + offs_pair + ROTARY_DIM // 2, mask=mask_pair, other=0.0)
        sin2 = sin2.to(tl.float32)
    if not IS_FORWARD:
        sin1, sin2 = -sin2, -sin1
    x1_fp32, x2_fp32 = x1.to(tl.float32), x2.to(tl.float32)
    out1 = (x1_fp32 * cos1[None, :] - x2_fp32 * sin1[None, :]).to(x1.dtype)
    out2 = (x2_fp32 * cos2[None, :] + x1_fp32 * sin2[None, :]).to(x2.dtype)
    if V_HEADS > 0:
        out1, out2 = tl.where(is_v, x1, out1), tl.where(is_v, x2, out2)
    if INTERLEAVED:
        out = tl.reshape(tl.join(out1, out2), (BLOCK_H, 2 * BLOCK_PAIRS))
        _store(
            q_out, k_out, v_out, offs_d[None, :], out, is_q, is_k, is_v, mask,
            K_HEADS, V_HEADS, OUT_PACKED
        )
    else:
        _store(
            q_out, k_out, v_out, lower, out1, is_q, is_k, is_v, mask, K_HEADS, V_HEADS, OUT_PACKED
        )
        _store(
            q_out, k_out, v_out, upper, out2, is_q, is_k, is_v, mask, K_HEADS, V_HEADS, OUT_PACKED
        )
    if BLOCK_REST > 0:
        rest = (ROTARY_DIM + tl.arange(0, BLOCK_REST))[None, :]
        mask = mask_h & (rest < HEAD_DIM)
        x = _load(q_in, k_in, v_in, rest, is_q, is_k, is_v, mask, K_HEADS, V_HEADS, IN_PACKED)
        _store(
            q_out, k_out, v_out, rest, x, is_q, is_k, is_v, mask, K_HEADS, V_HEADS, OUT_PACKED
        )
    # fmt: on
