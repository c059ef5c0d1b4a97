"""Weight gradient of a linear layer on Ascend: the grouped GEMM with one group, as torch-npu

2.13.0 declares it: npu_grouped_matmul_add_(Tensor(a!) self, Tensor x, Tensor weight,
Tensor group_list, *, bool transpose_x=True, bool transpose_weight=False, int group_type=2,
int? group_list_type=0) -> Tensor(a!)
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from mindspeed.ops.matmul_add_fp32.reference import operands


def matmul_add_fp32(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """Add grad_output (..., out)^T @ total_input (..., in) to grad (out, in) in place."""
    rows, columns = operands(total_input, grad_output)
    with torch.no_grad():
        if rows.dtype == grad.dtype:
            grad.addmm_(rows, columns)
        elif rows.numel() and columns.numel():
            end = torch.tensor([len(columns)], device=columns.device)
            torch_npu.npu_grouped_matmul_add_(grad.unsqueeze(0), rows.t(), columns, end)
