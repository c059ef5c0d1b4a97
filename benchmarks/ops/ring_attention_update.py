"""Merge of two partial attentions: two outputs read, one written, and their statistics."""

import torch
from op_case import Case, Work, compiled

from mindspeed.ops.ring_attention_update import ring_attention_update


def eager(prev, prev_max, prev_sum, cur, cur_max, cur_sum):
    """Merge by torch's operations, as the formula reads."""
    largest = torch.maximum(prev_max, cur_max)
    one = prev_sum * torch.exp(prev_max - largest)
    two = cur_sum * torch.exp(cur_max - largest)
    total = one + two

    def weighted(out, share):
        share = share[..., 0].permute(2, 0, 1).unsqueeze(-1)
        return out.unflatten(-1, (share.shape[2], -1)).to(share.dtype) * share

    out = (weighted(prev, one / total) + weighted(cur, two / total)).flatten(2)
    return out.to(prev.dtype), largest, total


def case(tokens, batch, heads, dim, prev_dtype, dtype=torch.bfloat16):
    """Race one shape."""

    def make_inputs(device):
        prev, cur = (torch.randn(tokens, batch, heads * dim, device=device) for _ in range(2))
        largest = [torch.randn(batch, heads, tokens, 1, device=device) for _ in range(2)]
        total = [torch.rand(batch, heads, tokens, 1, device=device) + 1 for _ in range(2)]
        one, two = (
            tuple(x.expand(-1, -1, -1, 8).contiguous() for x in both)
            for both in zip(largest, total)
        )
        return prev.to(prev_dtype), *one, cur.to(dtype), *two

    count = tokens * batch * heads
    per_number = 2 * prev_dtype.itemsize + dtype.itemsize
    return Case(
        op="ring_attention_update",
        shape=f"{tokens}x{batch}x{heads}x{dim} {str(prev_dtype).removeprefix('torch.')}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={"ours": ring_attention_update, "eager": eager, "compile": compiled(eager)},
        reference=eager,
        # A statistic is 32 bytes a row: four are read, two written.
        work={"fwd": Work(bytes=count * (dim * per_number + 6 * 32))},
    )


CASES = [
    case(4096, 2, 32, 128, torch.float32),
    case(4096, 2, 32, 128, torch.bfloat16),
    case(8192, 2, 64, 128, torch.float32),
]
TINY = [case(5, 2, 3, 8, torch.float32, torch.float32)]
