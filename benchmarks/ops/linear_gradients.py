"""Gradients of a linear layer: of the weight, accumulated in float32, and of the bias.

Weight: both inputs read, the sum read and written, one GEMM. Bias: a matrix is read once.
"""

import torch
from op_case import GEMMS, Case, Work, compiled

from mindspeed.ops.column_sum import column_sum
from mindspeed.ops.groupmatmul_add_fp32 import groupmatmul_add_fp32
from mindspeed.ops.matmul_add_fp32 import matmul_add_fp32


def returning(function):
    """Return a peer of a function that adds in place."""

    def peer(x, dy, grad):
        function(x, dy, grad)
        return grad

    return peer


def rounded_and_added(x, dy, grad):
    """Add the GEMM after it was rounded to the dtype of its inputs, as eager torch does."""
    grad.add_(dy.t() @ x)


def one_group(x, dy, grad):
    """Add by the grouped kernel, with one group."""
    groupmatmul_add_fp32(dy, x, torch.tensor([len(x)]), grad)


def gemm_alone(x, dy, grad):
    """Run the GEMM without the addition."""
    return {"fwd": lambda: dy.t() @ x}


def inputs(tokens, width_in, width_out, dtype):
    """Return a function that makes x, dy and the sum."""

    def make_inputs(device):
        x = torch.randn(tokens, width_in, device=device, dtype=dtype)
        dy = torch.randn(tokens, width_out, device=device, dtype=dtype)
        return x, dy, torch.randn(width_out, width_in, device=device)

    return make_inputs


def case(tokens, width_in, width_out, dtype=torch.bfloat16):
    """Measure one shape."""
    operands = tokens * (width_in + width_out) * dtype.itemsize
    return Case(
        op="matmul_add_fp32",
        shape=f"{tokens}x{width_in}x{width_out}",
        dtype=dtype,
        make_inputs=inputs(tokens, width_in, width_out, dtype),
        peers={
            "ours": returning(matmul_add_fp32),
            "eager": returning(rounded_and_added),
            "grouped kernel": returning(one_group),
        },
        reference=lambda x, dy, grad: grad + dy.t() @ x,
        lower_bounds={GEMMS: gemm_alone},
        work={
            "fwd": Work(
                bytes=operands + 8 * width_in * width_out, flops=2 * tokens * width_in * width_out
            )
        },
    )


def sum_eager(x):
    """Sum as torch does."""
    return x.sum(0)


def column_sum_case(rows, columns, dtype=torch.bfloat16):
    """Measure one shape."""
    return Case(
        op="column_sum",
        shape=f"{rows}x{columns}",
        dtype=dtype,
        make_inputs=lambda device: (torch.randn(rows, columns, device=device, dtype=dtype),),
        peers={"ours": column_sum, "eager": sum_eager, "compile": compiled(sum_eager)},
        reference=sum_eager,
        work={"fwd": Work(bytes=(rows + 1) * columns * dtype.itemsize)},
    )


SHAPES = [(8192, 4096, 28672), (8192, 1536, 17920), (8192, 8960, 1536), (8192, 1536, 2048)]
CASES = [
    *(case(*shape) for shape in SHAPES),
    *(column_sum_case(*shape) for shape in [(8192, 2048), (8192, 6144), (16384, 17920)]),
]
TINY = [case(24, 16, 8, torch.float32), column_sum_case(40, 6, torch.float32)]
