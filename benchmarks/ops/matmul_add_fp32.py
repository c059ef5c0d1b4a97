"""Weight gradient added to float32: both factors read, the sum read and written, one product."""

import torch
from op_case import PRODUCTS, Case, Work

from mindspeed.ops.groupmatmul_add_fp32 import groupmatmul_add_fp32
from mindspeed.ops.matmul_add_fp32 import matmul_add_fp32


def returning(function):
    """Make a peer of a function that adds in place."""

    def peer(x, dy, grad):
        function(x, dy, grad)
        return grad

    return peer


def rounded_and_added(x, dy, grad):
    """Add the product after it was rounded to the type of its factors, as eager torch does."""
    grad.add_(dy.t() @ x)


def one_group(x, dy, grad):
    """Add by the kernel for groups, all rows in one."""
    groupmatmul_add_fp32(dy, x, torch.tensor([len(x)]), grad)


def product(x, dy, grad):
    """Multiply and add nothing: what the sum is measured against."""
    return {"fwd": lambda: dy.t() @ x}


def inputs(tokens, wide_in, wide_out, dtype):
    """Return a function that makes x, dy and the sum."""

    def make_inputs(device):
        x = torch.randn(tokens, wide_in, device=device, dtype=dtype)
        dy = torch.randn(tokens, wide_out, device=device, dtype=dtype)
        return x, dy, torch.randn(wide_out, wide_in, device=device)

    return make_inputs


def case(tokens, wide_in, wide_out, dtype=torch.bfloat16):
    """Race one shape."""
    factors = tokens * (wide_in + wide_out) * dtype.itemsize
    return Case(
        op="matmul_add_fp32",
        shape=f"{tokens}x{wide_in}x{wide_out}",
        dtype=dtype,
        make_inputs=inputs(tokens, wide_in, wide_out, dtype),
        peers={
            "ours": returning(matmul_add_fp32),
            "eager": returning(rounded_and_added),
            "grouped kernel": returning(one_group),
        },
        reference=lambda x, dy, grad: grad + dy.t() @ x,
        yardsticks={PRODUCTS: product},
        work={
            "fwd": Work(
                bytes=factors + 8 * wide_in * wide_out, flops=2 * tokens * wide_in * wide_out
            )
        },
    )


SHAPES = [(8192, 4096, 28672), (8192, 1536, 17920), (8192, 8960, 1536), (8192, 1536, 2048)]
CASES = [case(*shape) for shape in SHAPES]
TINY = [case(24, 16, 8, torch.float32)]
