"""Weight gradient of a linear layer, in plain torch.

grad (out, in) += grad_output^T @ total_input, in place, in float32 (float64 for a float64 grad):
the GEMM is never rounded to the dtype of its inputs. Empty inputs change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def matmul_add_fp32(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """Add grad_output (..., out)^T @ total_input (..., in) to grad (out, in) in place."""
    rows, columns = operands(total_input, grad_output)
    with torch.no_grad():
        grad.addmm_(rows.to(grad.dtype), columns.to(grad.dtype))


def operands(total_input: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two matrices (out, T) and (T, in) to multiply."""
    return grad_output.flatten(0, -2).t(), total_input.flatten(0, -2)


def check(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """Raise ValueError for mismatched shapes and for a grad that would round."""
    acc_dtype = torch.float64 if total_input.dtype == torch.float64 else torch.float32
    is_match = grad.shape == (*grad_output.shape[-1:], *total_input.shape[-1:])
    if not is_match or total_input.shape[:-1] != grad_output.shape[:-1]:
        raise ValueError(
            "matmul_add_fp32 adds (..., out)^T @ (..., in) to (out, in), got grad_output "
            f"{tuple(grad_output.shape)}, total_input {tuple(total_input.shape)} and grad "
            f"{tuple(grad.shape)}"
        )
    if grad.dtype != acc_dtype or total_input.dtype != grad_output.dtype:
        raise ValueError(
            f"matmul_add_fp32 needs a grad of {acc_dtype} and two inputs of one dtype, got "
            f"{grad.dtype}, {total_input.dtype} and {grad_output.dtype}"
        )
