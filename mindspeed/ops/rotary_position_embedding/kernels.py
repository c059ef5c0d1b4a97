"""The Triton kernel of the rotary embedding; what a program does is told in triton_impl.

A place is memory and three strides, of token, batch and head; one that is not there is None.
"""

import triton
import triton.language as tl


@triton.jit
def _places(
    q,
    q_i,
    q_j,
    q_n,
    k,
    k_i,
    k_j,
    k_n,
    v,
    v_i,
    v_j,
    v_n,
    i,
    j,
    slot,
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Return where each slot lies in the memory of queries, keys and values."""
    group, part = slot // (Q + K + V), slot % (Q + K + V)
    if PACKED:
        at_q = q + i * q_i + j * q_j + slot * q_n
        at_k, at_v = at_q, at_q
    else:
        at_q = q + i * q_i + j * q_j + (group * Q + part) * q_n
        at_k, at_v = at_q, at_q
        if K > 0:
            at_k = k + i * k_i + j * k_j + (group * K + part - Q) * k_n
        if V > 0:
            at_v = v + i * v_i + j * v_j + (group * V + part - Q - K) * v_n
    return at_q[:, None], at_k[:, None], at_v[:, None]


@triton.jit
def _load(at_q, at_k, at_v, channel, is_q, is_k, is_v, inside, K, V, PACKED: tl.constexpr):
    if PACKED:
        return tl.load(at_q + channel, mask=inside, other=0.0)
    value = tl.load(at_q + channel, mask=inside & is_q, other=0.0)
    if K > 0:
        value += tl.load(at_k + channel, mask=inside & is_k, other=0.0)
    if V > 0:
        value += tl.load(at_v + channel, mask=inside & is_v, other=0.0)
    return value


@triton.jit
def _store(at_q, at_k, at_v, channel, value, is_q, is_k, is_v, inside, K, V, PACKED: tl.constexpr):
    if PACKED:
        tl.store(at_q + channel, value, mask=inside)
    else:
        tl.store(at_q + channel, value, mask=inside & is_q)
        if K > 0:
            tl.store(at_k + channel, value, mask=inside & is_k)
        if V > 0:
            tl.store(at_v + channel, value, mask=inside & is_v)


@triton.jit
def rotate(
    q,
    q_i,
    q_j,
    q_n,
    k,
    k_i,
    k_j,
    k_n,
    v,
    v_i,
    v_j,
    v_n,
    q_to,
    q_to_i,
    q_to_j,
    q_to_n,
    k_to,
    k_to_i,
    k_to_j,
    k_to_n,
    v_to,
    v_to_i,
    v_to_j,
    v_to_n,
    cos,
    sin,
    positions,
    table_i,
    table_j,
    batch,
    slots,
    FORTH: tl.constexpr,
    FROM_PACKED: tl.constexpr,
    TO_PACKED: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HEAD: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Turn some heads of a token, queries and keys, and copy its values."""
    token = tl.program_id(0).to(tl.int64)
    i, j = token // batch, token % batch
    slot = tl.program_id(1) * TILE + tl.arange(0, TILE)
    part = slot % (Q + K + V)
    # fmt: off
    from_q, from_k, from_v = _places(
        q, q_i, q_j, q_n, k, k_i, k_j, k_n, v, v_i, v_j, v_n, i, j, slot, Q, K, V, FROM_PACKED
    )
    to_q, to_k, to_v = _places(
        q_to, q_to_i, q_to_j, q_to_n, k_to, k_to_i, k_to_j, k_to_n, v_to, v_to_i, v_to_j, v_to_n,
        i, j, slot, Q, K, V, TO_PACKED
    )
    # fmt: on
    is_q, is_v = (part < Q)[:, None], (part >= Q + K)[:, None]
    is_k, is_slot = (part >= Q)[:, None] & (part < Q + K)[:, None], (slot < slots)[:, None]
    pair = tl.arange(0, PAIRS)
    inside = is_slot & (pair < TURNED // 2)[None, :]
    row = i if positions is None else tl.load(positions + token).to(tl.int64)
    at = row * table_i + j * table_j
    if INTERLEAVED:
        # Neighbours are read together and parted in registers: whole lines, not every other.
        both = tl.arange(0, 2 * PAIRS)
        is_both = both < TURNED
        inside = is_slot & is_both[None, :]
        read = _load(
            from_q, from_k, from_v, both[None, :], is_q, is_k, is_v, inside, K, V, FROM_PACKED
        )
        a, b = tl.split(tl.reshape(read, (TILE, PAIRS, 2)))
        c = tl.load(cos + at + both, mask=is_both, other=0.0).to(tl.float32)
        s = tl.load(sin + at + both, mask=is_both, other=0.0).to(tl.float32)
        cos_a, cos_b = tl.split(tl.reshape(c, (PAIRS, 2)))
        sin_a, sin_b = tl.split(tl.reshape(s, (PAIRS, 2)))
    else:
        lower, upper = pair[None, :], (pair + TURNED // 2)[None, :]
        a = _load(from_q, from_k, from_v, lower, is_q, is_k, is_v, inside, K, V, FROM_PACKED)
        b = _load(from_q, from_k, from_v, upper, is_q, is_k, is_v, inside, K, V, FROM_PACKED)
        is_pair = pair < TURNED // 2
        cos_a = tl.load(cos + at + pair, mask=is_pair, other=0.0).to(tl.float32)
        cos_b = tl.load(cos + at + pair + TURNED // 2, mask=is_pair, other=0.0).to(tl.float32)
        sin_a = tl.load(sin + at + pair, mask=is_pair, other=0.0).to(tl.float32)
        sin_b = tl.load(sin + at + pair + TURNED // 2, mask=is_pair, other=0.0).to(tl.float32)
    if not FORTH:
        sin_a, sin_b = -sin_b, -sin_a
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    turned_a = (wide_a * cos_a[None, :] - wide_b * sin_a[None, :]).to(a.dtype)
    turned_b = (wide_b * cos_b[None, :] + wide_a * sin_b[None, :]).to(b.dtype)
    if V > 0:
        turned_a, turned_b = tl.where(is_v, a, turned_a), tl.where(is_v, b, turned_b)
    # fmt: off
    if INTERLEAVED:
        joined = tl.reshape(tl.join(turned_a, turned_b), (TILE, 2 * PAIRS))
        _store(to_q, to_k, to_v, both[None, :], joined, is_q, is_k, is_v, inside, K, V, TO_PACKED)
    else:
        _store(to_q, to_k, to_v, lower, turned_a, is_q, is_k, is_v, inside, K, V, TO_PACKED)
        _store(to_q, to_k, to_v, upper, turned_b, is_q, is_k, is_v, inside, K, V, TO_PACKED)
    if REST > 0:
        rest = (TURNED + tl.arange(0, REST))[None, :]
        inside = is_slot & (rest < HEAD)
        kept = _load(from_q, from_k, from_v, rest, is_q, is_k, is_v, inside, K, V, FROM_PACKED)
        _store(to_q, to_k, to_v, rest, kept, is_q, is_k, is_v, inside, K, V, TO_PACKED)
    # fmt: on
