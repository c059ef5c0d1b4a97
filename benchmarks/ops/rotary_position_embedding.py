"""Rotary embedding of queries and keys: one read and one write of each, both ways."""

import torch
from op_case import Case, Work, compiled, optional

from mindspeed.ops.rotary_position_embedding import rotate_qk


def angles(length, dim, device):
    """Return the angles of Llama's rotary embedding, (S, 1, 1, D)."""
    inverse = 10000.0 ** (-torch.arange(0, dim, 2, device=device) / dim)
    per_pair = torch.outer(torch.arange(length, device=device).float(), inverse)
    return torch.cat([per_pair, per_pair], -1)[:, None, None]


def eager(q, k, freqs):
    """Rotate in eager torch, as transformers does."""
    cos, sin = freqs.cos().to(q.dtype), freqs.sin().to(q.dtype)

    def rotate(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return rotate(q), rotate(k)


def liger_peer():
    """Return Liger's peer, whose tensors are (B, N, S, D) and whose tables (1, S, D)."""
    rope = optional("liger_kernel.transformers.functional:liger_rope")

    def rotate(q, k, freqs):
        cos, sin = (t[:, 0, 0][None].to(q.dtype) for t in (freqs.cos(), freqs.sin()))
        q, k = rope(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), cos, sin)
        return q.permute(2, 0, 1, 3), k.permute(2, 0, 1, 3)

    return rope and rotate


def case(tokens, batch, heads, groups, dim, dtype=torch.bfloat16):
    """Measure one shape."""

    def make_inputs(device):
        q, k = (
            torch.randn(tokens, batch, n, dim, device=device, dtype=dtype, requires_grad=True)
            for n in (heads, groups)
        )
        return q, k, angles(tokens, dim, device)

    tensors = tokens * batch * (heads + groups) * dim * dtype.itemsize
    work = {"fwd": Work(bytes=2 * tensors), "bwd": Work(bytes=2 * tensors)}
    return Case(
        op="rotate_qk",
        shape=f"{tokens}x{batch}x({heads}+{groups})x{dim}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={
            "ours": rotate_qk,
            "eager": eager,
            "compile": compiled(eager),
            "liger": liger_peer(),
        },
        reference=eager,
        work=work | {"full": work["fwd"] + work["bwd"]},
    )


SHAPES = [(4096, 12, 2), (4096, 32, 8), (4096, 64, 8), (8192, 32, 8), (8192, 64, 8)]
CASES = [case(tokens, 2, heads, groups, 128) for tokens, heads, groups in SHAPES]
TINY = [case(5, 2, 4, 2, 8, torch.float32)]
