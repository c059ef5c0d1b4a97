"""Normed and rotated heads of a packed qkv tensor: read once, written once, both ways."""

import torch
from op_case import Case, Work, compiled
from ops.rotary_position_embedding import angles, eager

from mindspeed.ops.norm import rms_norm
from mindspeed.ops.norm_rotate_qkv import norm_rotate_qkv
from mindspeed.ops.rotary_position_embedding import rotate_qk

EPS = 1e-6


def split(qkv, head_dim):
    """Return queries, keys and values of (S, B, groups, heads * head_dim)."""
    query, key, value = qkv.split([qkv.shape[-1] - 2 * head_dim, head_dim, head_dim], -1)
    return query.reshape(*query.shape[:2], -1, head_dim), key, value


def plain(qkv, q_weight, k_weight, freqs):
    """Norm and rotate in eager torch."""
    query, key, value = split(qkv, len(q_weight))
    query, key = (
        torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)
        for x, weight in ((query, q_weight), (key, k_weight))
    )
    return *eager(query, key, freqs), value


def apart(qkv, q_weight, k_weight, freqs):
    """Norm, norm and rotate by an operator each."""
    query, key, value = split(qkv, len(q_weight))
    query, key = rms_norm(query, q_weight, EPS), rms_norm(key, k_weight, EPS)
    return *rotate_qk(query, key, freqs), value


def case(tokens, batch, heads, groups, dim, dtype=torch.bfloat16):
    """Measure one shape."""
    sizes = [heads // groups * dim, dim, dim]

    def make_inputs(device):
        options = {"device": device, "dtype": dtype, "requires_grad": True}
        qkv = torch.randn(tokens, batch, groups, sum(sizes), **options)
        weights = (torch.randn(dim, **options) for _ in range(2))
        return qkv, *weights, angles(tokens, dim, device)

    packed = tokens * batch * groups * sum(sizes) * dtype.itemsize
    work = {"fwd": Work(bytes=2 * packed), "bwd": Work(bytes=3 * packed)}
    return Case(
        op="norm_rotate_qkv",
        shape=f"{tokens}x{batch}x({heads}+2*{groups})x{dim}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={
            "ours": lambda *x: norm_rotate_qkv(*x, sizes, EPS),
            "operators apart": apart,
            "eager": plain,
            "compile": compiled(plain),
        },
        reference=plain,
        work=work | {"full": work["fwd"] + work["bwd"]},
    )


CASES = [case(4096, batch, 32, groups, 128) for batch, groups in ((4, 4), (2, 8))]
TINY = [case(5, 2, 4, 2, 8, torch.float32)]
