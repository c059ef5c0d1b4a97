"""Bringing rows back to their tokens on Ascend, as torch-npu 2.13.0 declares it:

npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None,
bool padded_mode=False, int[]? restore_shape=None) -> Tensor
"""

from __future__ import annotations

from collections.abc import Sequence

import torch_npu
from torch import Tensor

from mindspeed.ops.moe_token_unpermute import reference


def moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Return the tokens (T, H) of the rows (R, H)."""
    if padded_mode:  # the kernel does not serve it
        return reference.moe_token_unpermute(
            permuted_tokens, sorted_indices, probs, padded_mode, restore_shape
        )
    return torch_npu.npu_moe_token_unpermute(
        permuted_tokens, sorted_indices, probs, padded_mode, restore_shape
    )
