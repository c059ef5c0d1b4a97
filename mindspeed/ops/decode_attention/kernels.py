"""Triton kernels of decode_attention; triton_impl describes what a program does.

B rows, G heads of keys, N queries for each, H head size, T positions in the cache.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_rotated(x_ptr, stride, rows, mask, cos_ptr, sin_ptr, offs_d, HEAD_DIM: tl.constexpr):
    """Load rows of a head and rotate them: channels half a head apart make a pair."""
    ptrs = x_ptr + rows[:, None] * stride
    x = tl.load(ptrs + offs_d[None, :], mask=mask, other=0.0)
    if cos_ptr is None:
        return x
    is_lower, mask_d = offs_d < HEAD_DIM // 2, offs_d < HEAD_DIM
    other_d = tl.where(is_lower, offs_d + HEAD_DIM // 2, offs_d - HEAD_DIM // 2)
    other = tl.load(ptrs + other_d[None, :], mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    sin = tl.where(is_lower, -sin, sin)
    return (x.to(tl.float32) * cos[None, :] + other * sin[None, :]).to(x.dtype)


@triton.jit
def decode(
    q_ptr,
    stride_qb,
    stride_qg,
    stride_qn,
    k_ptr,
    stride_kb,
    stride_kg,
    v_ptr,
    stride_vb,
    stride_vg,
    keys_ptr,
    stride_kct,
    stride_kcb,
    stride_kcg,
    values_ptr,
    stride_vct,
    stride_vcb,
    stride_vcg,
    cos_ptr,
    sin_ptr,
    stride_t,
    position_ptr,
    stride_p,
    first_ptr,
    out_ptr,
    max_ptr,
    sum_ptr,
    scale,
    NUM_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Attend the queries of a row and key head to one split of the keys.

    The last split has the new key, which never leaves registers, and writes it to the cache.
    """
    row, group, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    mask_n, mask_d = offs_n < NUM_QUERIES, offs_d < HEAD_DIM
    position = tl.load(position_ptr + row * stride_p).to(tl.int32)
    if cos_ptr is not None:
        cos_ptr += position.to(tl.int64) * stride_t
        sin_ptr += position.to(tl.int64) * stride_t
    mask = mask_n[:, None] & mask_d[None, :]
    q_ptr += row * stride_qb + group * stride_qg
    q = _load_rotated(q_ptr, stride_qn, offs_n, mask, cos_ptr, sin_ptr, offs_d, HEAD_DIM)
    keys_ptr += row * stride_kcb + group * stride_kcg
    values_ptr += row * stride_vcb + group * stride_vcg

    first = 0
    if first_ptr is not None:
        first = tl.load(first_ptr + row).to(tl.int32)
    span = tl.cdiv(tl.cdiv(position - first, SPLITS), BLOCK_T) * BLOCK_T
    begin = first + split * span
    end = tl.minimum(begin + span, position)

    top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    scale *= _LOG2_E
    if split == SPLITS - 1:
        one = tl.arange(0, 1)
        k_ptr += row * stride_kb + group * stride_kg
        k = _load_rotated(k_ptr, 0, one, mask_d[None, :], cos_ptr, sin_ptr, offs_d, HEAD_DIM)
        v_ptrs = v_ptr + row * stride_vb + group * stride_vg + offs_d[None, :]
        v = tl.load(v_ptrs, mask=mask_d[None, :], other=0.0)
        k, v = k.to(keys_ptr.dtype.element_ty), v.to(values_ptr.dtype.element_ty)
        at = position.to(tl.int64)
        tl.store(keys_ptr + at * stride_kct + offs_d[None, :], k, mask=mask_d[None, :])
        tl.store(values_ptr + at * stride_vct + offs_d[None, :], v, mask=mask_d[None, :])
        top = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale
        total += 1.0
        acc += v.to(tl.float32)

    q = q.to(keys_ptr.dtype.element_ty)
    for start in range(begin, end, BLOCK_T):
        offs_t = start + tl.arange(0, BLOCK_T)
        mask_t = offs_t < end
        at = offs_t.to(tl.int64)
        keys = tl.load(
            keys_ptr + at[None, :] * stride_kct + offs_d[:, None],
            mask=mask_t[None, :] & mask_d[:, None],
            other=0.0,
        )
        values = tl.load(
            values_ptr + at[:, None] * stride_vct + offs_d[None, :],
            mask=mask_t[:, None] & mask_d[None, :],
            other=0.0,
        )
        scores = tl.dot(q, keys, input_precision="ieee") * scale
        scores = tl.where(mask_t[None, :], scores, float("-inf"))
        top_now = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - top_now[:, None])
        decay = tl.exp2(top - top_now)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        top = top_now

    query = (row * tl.num_programs(1) + group) * NUM_QUERIES + offs_n
    if SPLITS == 1:
        out = acc / total[:, None]
        out_ptrs = out_ptr + query[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        part = query * SPLITS + split
        tl.store(out_ptr + part[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=mask)
        tl.store(max_ptr + part, top, mask=mask_n)
        tl.store(sum_ptr + part, total, mask=mask_n)


@triton.jit
def merge(
    parts_ptr,
    max_ptr,
    sum_ptr,
    out_ptr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the splits of one query; those without keys have a maximum of -inf."""
    query = tl.program_id(0).to(tl.int64)
    offs_s, offs_d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    mask_s, mask_d = offs_s < SPLITS, offs_d < HEAD_DIM
    part = query * SPLITS + offs_s
    tops = tl.load(max_ptr + part, mask=mask_s, other=float("-inf"))
    weights = tl.exp2(tops - tl.max(tops, axis=0))
    total = tl.sum(weights * tl.load(sum_ptr + part, mask=mask_s, other=0.0), axis=0)
    acc = tl.load(
        parts_ptr + part[:, None] * HEAD_DIM + offs_d[None, :],
        mask=mask_s[:, None] & mask_d[None, :],
        other=0.0,
    )
    out = tl.sum(weights[:, None] * acc, axis=0) / total
    tl.store(out_ptr + query * HEAD_DIM + offs_d, out.to(out_ptr.dtype.element_ty), mask=mask_d)
