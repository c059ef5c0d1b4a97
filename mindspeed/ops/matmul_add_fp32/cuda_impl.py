"""Weight gradient of a linear layer by cuBLAS, which adds to float32 in the GEMM's epilogue."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mindspeed.ops.fp32_gemm import matmul_fp32
from mindspeed.ops.matmul_add_fp32.reference import operands


def matmul_add_fp32(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """Add grad_output (..., out)^T @ total_input (..., in) to grad (out, in) in place."""
    rows, columns = operands(total_input, grad_output)
    with torch.no_grad():
        if rows.dtype == grad.dtype:
            grad.addmm_(rows, columns)
        # torch 2.11 runs addmm with out_dtype, and cannot trace it.
        elif not torch.compiler.is_compiling() and _adds_into_float32(rows.dtype, rows.device):
            torch.addmm(grad, rows, columns, out_dtype=grad.dtype, out=grad)
        else:
            grad.add_(matmul_fp32(rows, columns))


@functools.cache
def _adds_into_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether this torch adds a half-precision GEMM to a float32 tensor in place."""
    half = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.ones(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, half, half, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())
