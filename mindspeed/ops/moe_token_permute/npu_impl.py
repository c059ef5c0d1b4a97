"""Sorting tokens by expert on Ascend, as torch-npu 2.13.0 declares it:

npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None,
bool padded_mode=False) -> (Tensor, Tensor)
"""

import torch_npu
from torch import Tensor

from mindspeed.ops.moe_token_permute import reference


def moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the rows sorted by expert, and the row (T * k,) int32 of each pair."""
    if padded_mode:  # the kernel does not serve it
        return reference.moe_token_permute(tokens, indices, num_out_tokens, padded_mode)
    rows, places = torch_npu.npu_moe_token_permute(tokens, indices, num_out_tokens, padded_mode)
    return rows, places
