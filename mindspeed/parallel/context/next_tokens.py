"""The token after each token, where rows hold documents and where ranks share sequences.

Multi-token prediction asks for tokens, positions, labels and loss masks of one step on. Megatron
finds them inside the part of a rank (0.12), or moves the ends of each document by themselves, whose
bounds it reads from the device one by one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed.distributed.collectives import all_gather, group_rank, group_size
from mindspeed.ops.packed_batch import host_bounds
from mindspeed.parallel.context.whole_documents import DOCUMENT_LAYOUTS

Roll = Callable[..., tuple[Tensor, Tensor]]


def wrap_roll_tensor(original: Roll, document_layout: str | None = None) -> Roll:
    """Return what follows in the document, wherever it is, and the sum of it.

    The sum counts the labels that a loss is divided by: as gradients are averaged over the ranks
    that share sequences, it is that of all of them, divided by their number. A row without labels
    counts as one label of loss 0.

    This wraps every roll_tensor, and once more where a layout is chosen; the patch with a layout
    may be the inner one.
    """
    inner: str = getattr(original, "document_layout", "zigzag")
    chosen = document_layout or inner
    signature = inspect.signature(original)
    knows_ranks = "cp_group" in signature.parameters

    @functools.wraps(original)
    def roll_tensor(
        tensor: Tensor, shifts: int = -1, dims: int = -1, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        given = signature.bind(tensor, shifts, dims, *args, **kwargs).arguments
        packed = given.get("packed_seq_params")
        group = given.get("cp_group") if knows_ranks else _context_group()
        size = group_size(group)
        if packed is None and size == 1:
            rolled, count = original(tensor, shifts, dims)
            return rolled, count.clamp(min=1)
        whole = all_gather(tensor, group, dim=-1)
        length = whole.shape[-1]
        bounds = (0, length) if packed is None else _bounds(packed, length)
        is_last = _is_last(bounds, whole.device)
        if size == 1:
            rolled = whole.roll(-1, -1).masked_fill(is_last, 0)
            return rolled, rolled.sum().clamp(min=1)
        layout = DOCUMENT_LAYOUTS[chosen](bounds, size)
        rolled = layout.unshard(whole, dim=-1).roll(-1, -1).masked_fill(is_last, 0)
        return layout.shard(rolled, group_rank(group), dim=-1), rolled.sum().clamp(min=1) / size

    roll_tensor.document_layout = chosen  # type: ignore[attr-defined]
    return roll_tensor


def _bounds(packed: Any, length: int) -> tuple[int, ...]:
    """Return where documents with their padding begin and end, one of the rows behind them too."""
    padded = packed.cu_seqlens_q_padded
    bounds = host_bounds(packed.cu_seqlens_q if padded is None else padded)
    return (*bounds,) if bounds[-1] == length else (*bounds, length)


@functools.lru_cache(maxsize=64)
def _is_last(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    """Return which rows are the last of a document."""
    is_last = torch.zeros(bounds[-1], dtype=torch.bool)
    is_last[torch.tensor(bounds[1:]) - 1] = True
    return is_last.to(device)


def _context_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group(check_initialized=False)
