"""Row numbers of chunks of dim 0 that change their order."""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_rows(sizes: Tensor, order: Tensor, num_rows: int) -> Tensor:
    """Return the row that each row of the result comes from: chunk order[0] first, and so on.

    Args:
        sizes: (chunks,) rows of each chunk, `num_rows` together.
        order: (chunks,) the chunks of the result.
        num_rows: given, so that the device need not be waited for.
    """
    starts = sizes.cumsum(0) - sizes
    taken = sizes[order]
    shift = starts[order] - (taken.cumsum(0) - taken)
    shift = shift.repeat_interleave(taken, output_size=num_rows)
    return torch.arange(num_rows, device=sizes.device) + shift
