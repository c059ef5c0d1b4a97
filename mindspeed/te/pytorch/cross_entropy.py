"""Vocabulary-parallel cross entropy under the name Megatron imports."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed.ops.cross_entropy import cross_entropy


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: ProcessGroup | None = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> Tensor:
    """Return the float32 loss of each token of inp (..., V on this rank), or reduced, their mean.

    Megatron passes all seven by position; `is_cg_capturable` changes no number. As with the
    original, the gradient takes the place of logits that were computed for this loss.
    """
    loss = cross_entropy(
        inp,
        target,
        dist_process_group,
        smoothing=label_smoothing,
        ignore_index=ignore_idx,
        in_place=not inp.is_leaf,
    )
    return loss.sum() / (target != ignore_idx).sum() if reduce_loss else loss
