"""Causal attention by each of torch's backends, packed attention, and the merge of ring attention.

The merge reads two partial outputs and their statistics, and writes one.
"""

import itertools

import torch
from op_case import Case, Work, compiled
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mindspeed import device
from mindspeed.ops.fusion_attention import sdpa
from mindspeed.ops.ring_attention_update import ring_attention_update


def by(backend):
    """Return attention by one backend of torch; None on a cpu, which has only one."""
    if device.current().name == "cpu":
        return None

    def attend(q, k, v):
        with sdpa_kernel(backend):
            return eager(q, k, v)

    return attend


def eager(q, k, v):
    """Return attention by the backend that torch selects."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def ours(q, k, v):
    """Return attention by the backend that we select."""
    return sdpa.attention(q, k, v, scale=q.shape[-1] ** -0.5, is_causal=True)


def exact(q, k, v):
    """Return attention by the formula."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], device=q.device, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def case(batch, heads, groups, tokens, dim, dtype=torch.bfloat16):
    """Measure one shape."""

    def inputs(tokens):
        def make(device):
            def draw(count):
                # Megatron's layout: (S, B, N, H), viewed as (B, N, S, H).
                x = torch.randn(tokens, batch, count, dim, device=device, dtype=dtype)
                return x.permute(1, 2, 0, 3).requires_grad_()

            return draw(heads), draw(groups), draw(groups)

        return make

    # Half of the scores are computed: 4 multiply-adds a score and channel forward, 10 backward.
    gemm = batch * heads * tokens * tokens * dim
    work = {"fwd": Work(flops=2 * gemm), "bwd": Work(flops=5 * gemm)}
    return Case(
        op="attention",
        shape=f"{batch}x{heads}({groups})x{tokens}x{dim}",
        dtype=dtype,
        make_inputs=inputs(tokens),
        gate_inputs=inputs(min(tokens, 1024)),
        peers={
            "ours": ours,
            "eager": eager,
            "cudnn": by(SDPBackend.CUDNN_ATTENTION),
            "flash": by(SDPBackend.FLASH_ATTENTION),
        },
        reference=exact,
        must_repeat=False,  # cuDNN's backward adds in any order; deterministic mode avoids it
        work=work | {"full": work["fwd"] + work["bwd"]},
    )


def packed_case(lengths, heads, groups, dim, dtype=torch.bfloat16):
    """Measure packed documents, each of which attends to itself only."""

    def make_inputs(device):
        counts = heads, groups, groups
        tensors = (torch.randn(sum(lengths), n, dim, device=device, dtype=dtype) for n in counts)
        ends = torch.tensor([0, *itertools.accumulate(lengths)], device=device, dtype=torch.int32)
        return *(x.requires_grad_() for x in tensors), ends

    def packed(q, k, v, ends):
        documents = sdpa.Documents(ends, ends, max(lengths), max(lengths))
        options = {"scale": dim**-0.5, "dropout": 0.0, "window": (-1, 0)}
        return sdpa.flash_attention(q, k, v, documents=documents, **options)

    def flash(q, k, v, ends):
        bounds = ends, ends, max(lengths), max(lengths)
        attend = torch.ops.aten._flash_attention_forward
        return attend(q, k, v, *bounds, 0.0, True, False, scale=dim**-0.5)[0]

    def one_by_one(q, k, v, ends):
        parts = zip(*(x.transpose(0, 1).unsqueeze(0).split(lengths, 2) for x in (q, k, v)))
        return torch.cat([exact(*part)[0].transpose(0, 1) for part in parts])

    gemm = heads * dim * sum(length * length for length in lengths)
    work = {"fwd": Work(flops=2 * gemm), "bwd": Work(flops=5 * gemm)}
    return Case(
        op="packed_attention",
        shape=f"{len(lengths)} of {min(lengths)}-{max(lengths)}x{heads}({groups})x{dim}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={"ours": packed, "flash": flash},
        reference=one_by_one,
        must_repeat=False,
        work=work | {"full": work["fwd"] + work["bwd"]},
    )


def merge_eager(prev, prev_max, prev_sum, cur, cur_max, cur_sum):
    """Merge by the formula in eager torch."""
    largest = torch.maximum(prev_max, cur_max)
    one = prev_sum * torch.exp(prev_max - largest)
    two = cur_sum * torch.exp(cur_max - largest)
    total = one + two

    def weighted(out, share):
        share = share[..., 0].permute(2, 0, 1).unsqueeze(-1)
        return out.unflatten(-1, (share.shape[2], -1)).to(share.dtype) * share

    out = (weighted(prev, one / total) + weighted(cur, two / total)).flatten(2)
    return out.to(prev.dtype), largest, total


def merge_case(tokens, batch, heads, dim, prev_dtype, dtype=torch.bfloat16):
    """Measure one shape."""

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
        peers={
            "ours": ring_attention_update,
            "eager": merge_eager,
            "compile": compiled(merge_eager),
        },
        reference=merge_eager,
        # A statistic is 32 bytes a row: four are read, two written.
        work={"fwd": Work(bytes=count * (dim * per_number + 6 * 32))},
    )


CASES = [
    case(2, 12, 2, 4096, 128),
    case(2, 32, 32, 4096, 128),
    case(2, 32, 8, 4096, 128),
    case(4, 16, 16, 2048, 64),
    case(8, 32, 8, 512, 128),
    case(16, 32, 8, 256, 128),
    case(1, 32, 8, 32768, 128),
    packed_case((1024,) * 8, 32, 8, 128),
    packed_case((256, 1024, 512, 2816, 128, 3456), 12, 2, 128),
    merge_case(4096, 2, 32, 128, torch.float32),
    merge_case(4096, 2, 32, 128, torch.bfloat16),
    merge_case(8192, 2, 64, 128, torch.float32),
]
TINY = [
    case(2, 4, 2, 9, 8, torch.float32),
    merge_case(5, 2, 3, 8, torch.float32, torch.float32),
]
