"""Weight gradients of grouped GEMMs on Ascend, as torch-npu 2.13.0 declares them:

npu_grouped_matmul_add_(Tensor(a!) self, Tensor x, Tensor weight, Tensor group_list, *,
bool transpose_x=True, bool transpose_weight=False, int group_type=2, int? group_list_type=0)
-> Tensor(a!)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_npu
from torch import Tensor


def groupmatmul_add_fp32(
    x: Tensor, dy: Tensor, group_list: Tensor | Sequence[int], out: Tensor | Sequence[Tensor]
) -> None:
    """Add x_g^T @ dy_g to out for each group of rows."""
    ends = torch.as_tensor(group_list, dtype=torch.int64).to(x.device)
    shape = (len(ends), x.shape[1], dy.shape[1])
    with torch.no_grad():
        if isinstance(out, Tensor):
            torch_npu.npu_grouped_matmul_add_(out.view(shape), x, dy, ends)
            return
        total = x.new_zeros(shape, dtype=torch.float32)
        torch_npu.npu_grouped_matmul_add_(total, x, dy, ends)
        torch._foreach_add_(list(out), list(total.unbind()))
