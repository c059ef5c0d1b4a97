"""Weight gradients added into `main_grad`: what Megatron's gradient_accumulation_fusion calls."""

from __future__ import annotations

from torch import Tensor


def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add grad_output^T @ total_input to a float32 `main_grad` (out, in)."""
    _accumulate(total_input, grad_output, main_grad)


def wgrad_gemm_accum_fp16(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add grad_output^T @ total_input to a float16 or bfloat16 `main_grad` (out, in)."""
    _accumulate(total_input, grad_output, main_grad)


def _accumulate(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    rows, columns = (x.flatten(0, -2).to(main_grad.dtype) for x in (grad_output, total_input))
    main_grad.addmm_(rows.t(), columns)
