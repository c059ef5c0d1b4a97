"""Causal attention: which of torch's backends is the fastest, and that ours is the one taken."""

import itertools

import torch
from op_case import Case, Work
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mindspeed import device
from mindspeed.ops.fusion_attention import sdpa


def by(backend):
    """Attend by one backend of torch; None where there is only one, on a cpu."""
    if device.current().name == "cpu":
        return None

    def attend(q, k, v):
        with sdpa_kernel(backend):
            return eager(q, k, v)

    return attend


def eager(q, k, v):
    """Attend by the backend that torch takes."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def ours(q, k, v):
    """Attend by the backend that we take."""
    return sdpa.attention(q, k, v, scale=q.shape[-1] ** -0.5, is_causal=True)


def exact(q, k, v):
    """Attend by the formula."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], device=q.device, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def case(batch, heads, groups, tokens, dim, dtype=torch.bfloat16):
    """Race one shape."""

    def inputs(tokens):
        def make(device):
            def draw(count):
                # As Megatron has them: (S, B, N, H), seen as (B, N, S, H).
                x = torch.randn(tokens, batch, count, dim, device=device, dtype=dtype)
                return x.permute(1, 2, 0, 3).requires_grad_()

            return draw(heads), draw(groups), draw(groups)

        return make

    # Half of the scores are computed: 4 multiply-adds a score and channel forward, 10 backward.
    product = batch * heads * tokens * tokens * dim
    work = {"fwd": Work(flops=2 * product), "bwd": Work(flops=5 * product)}
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
    """Race documents in a row, each of which sees itself only."""

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

    product = heads * dim * sum(length * length for length in lengths)
    work = {"fwd": Work(flops=2 * product), "bwd": Work(flops=5 * product)}
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
]
TINY = [case(2, 4, 2, 9, 8, torch.float32)]
