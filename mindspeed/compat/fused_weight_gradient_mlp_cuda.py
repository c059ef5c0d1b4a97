"""Weight gradients added into `main_grad`: what Megatron's gradient_accumulation_fusion calls."""

from __future__ import annotations

import torch
from torch import Tensor


def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add grad_output^T @ total_input to a float32 `main_grad` (out, in)."""
    _accumulate(total_input, grad_output, main_grad)


def wgrad_gemm_accum_fp16(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add grad_output^T @ total_input to a float16 or bfloat16 `main_grad` (out, in)."""
    _accumulate(total_input, grad_output, main_grad)


def _accumulate(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    rows, columns = grad_output.flatten(0, -2).t(), total_input.flatten(0, -2)
    if rows.dtype != main_grad.dtype and rows.is_cuda and "dtype" in torch.ops.aten.mm.overloads():
        # Only CUDA multiplies half tensors into a float32 result, since torch 2.8.
        main_grad.add_(torch.mm(rows, columns, out_dtype=main_grad.dtype))
        return
    main_grad.addmm_(rows.to(main_grad.dtype), columns.to(main_grad.dtype))
