"""Weight gradients added into `main_grad`: what Megatron's gradient_accumulation_fusion calls."""

from __future__ import annotations

from torch import Tensor

from mindspeed.ops.matmul_add_fp32 import matmul_add_fp32


def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add grad_output^T @ total_input to a float32 `main_grad` (out, in)."""
    matmul_add_fp32(total_input, grad_output, main_grad)


def wgrad_gemm_accum_fp16(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add grad_output^T @ total_input to a float16 or bfloat16 `main_grad` (out, in)."""
    rows, columns = grad_output.flatten(0, -2).t(), total_input.flatten(0, -2)
    main_grad.addmm_(rows.to(main_grad.dtype), columns.to(main_grad.dtype))
