"""Sorting tokens by expert and back on Ascend, as torch-npu 2.13.0 declares it:

npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None,
bool padded_mode=False) -> (Tensor, Tensor)
npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None,
bool padded_mode=False, int[]? restore_shape=None) -> Tensor
"""

from __future__ import annotations

from collections.abc import Sequence

import torch_npu
from torch import Tensor

from mindspeed.ops.moe_token_permute import reference


def moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the rows sorted by expert, and the row (T * k,) int32 of each pair."""
    if padded_mode:  # not supported by the kernel
        return reference.moe_token_permute(tokens, indices, num_out_tokens, padded_mode)
    rows, row_ids = torch_npu.npu_moe_token_permute(tokens, indices, num_out_tokens, padded_mode)
    return rows, row_ids


def moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Return the tokens (T, H) of the rows (R, H)."""
    if padded_mode:  # not supported by the kernel
        return reference.moe_token_unpermute(
            permuted_tokens, sorted_indices, probs, padded_mode, restore_shape
        )
    return torch_npu.npu_moe_token_unpermute(
        permuted_tokens, sorted_indices, probs, padded_mode, restore_shape
    )
