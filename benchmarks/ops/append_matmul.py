"""A matrix with its matmul by a few rows appended: read once, written once."""

import torch
from op_case import Case, Work

from mindspeed.ops.append_matmul import append_matmul, reference


def copy_alone(x, a):
    """Copy x into the wider matrix, without the matmul."""
    out = x.new_empty(len(x), x.shape[1] + len(a))
    return {"fwd": lambda: out[:, : x.shape[1]].copy_(x)}


def case(tokens, rank, width, dtype=torch.bfloat16):
    """Measure one shape."""

    def make_inputs(device):
        x = torch.randn(tokens, width, device=device, dtype=dtype)
        return x, torch.randn(rank, width, device=device, dtype=dtype)

    written = tokens * (width + 2 * rank)
    return Case(
        op="append_matmul",
        shape=f"{tokens}x{width}+{rank}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={"ours": append_matmul, "eager": reference.append_matmul},
        reference=lambda x, a: (torch.cat((x, x @ a.t()), 1), x @ a.t()),
        lower_bounds={"copy alone": copy_alone},
        work={
            "fwd": Work(
                bytes=(tokens * width + rank * width + written) * dtype.itemsize,
                flops=2 * tokens * width * rank,
            )
        },
    )


CASES = [case(32768, rank, 1536) for rank in (16, 32, 48)] + [case(16384, 48, 4096)]
TINY = [case(40, 4, 24, torch.float32)]
